"""The draft heads of EAGLE-1/2 and EAGLE-3: one decoder layer that reads the target's hidden states.

Row t pairs the hidden state after token t with the embedding of token t + 1, has position t, and predicts token t +
2. If the target has not computed a hidden state yet, a row uses the draft's output for the previous row. Sources:
arXiv 2401.15077, 2503.01840.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from common.checkpoint.draft_config import DraftConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.formats.format_registry import weight_format
from common.engine.forward.draft_inputs import DraftExtendInput
from common.engine.layers.activations import Activations
from common.engine.layers.attention import Attention
from common.engine.layers.linear import Embedding, Linear, WeightFormat, logits
from common.engine.layers.mlp import Mlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.layers.rotary import Rotary
from common.engine.models.causal_lm import CausalLM
from common.engine.models.decoder import DecoderLayer

# Tensors that a checkpoint may contain.
EMBEDDING, LM_HEAD, FC_BIAS, D2T = "embed_tokens.weight", "lm_head.weight", "fc.bias", "d2t"


def input_norm(layer: int) -> str:
    """Return the name of the norm before attention in a layer of an EAGLE-1/2 head."""
    return f"layers.{layer}.input_layernorm.weight"


class DraftOutput(NamedTuple):
    """The output of a draft step, per row."""

    last: Tensor  # [T, H] input of the LM head
    hidden: Tensor  # [T, H] input of the next step


class DraftHead(Protocol):
    """The interface of a draft model for prefill and decode."""

    def project(self, target_hidden: Tensor) -> Tensor:
        """Convert hidden states of the target [T, DraftExtendInput.hidden_size_for] to inputs of a step [T, H]."""
        ...

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput: ...

    def compute_logits(self, last: Tensor) -> Tensor:
        """Return [R, draft vocabulary] float32 for [R, H]."""
        ...

    def target_ids(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft's vocabulary to ids of the target's."""
        ...


class SplitHead(DraftHead, Protocol):
    """A draft model whose embedding may run separately from its layers: graphs contain only the layers."""

    placement: Placement

    def embed(self, ids: Tensor) -> Tensor:
        """Return [T, H] for ids [T] int64."""
        ...

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        """Run everything after the embedding."""
        ...


class DraftModule(nn.Module, ABC):
    """Base of heads that use the target's hidden states unchanged and draft in the target's vocabulary."""

    placement: Placement
    embed_tokens: Embedding  # [V, H]
    lm_head: Linear  # from H to the draft's vocabulary

    @abstractmethod
    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput: ...

    def project(self, target_hidden: Tensor) -> Tensor:
        return target_hidden

    def embed(self, ids: Tensor) -> Tensor:
        embeds: Tensor = self.embed_tokens(ids)
        return embeds

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        return self.body(self.embed(ids), hidden, positions, attention)

    def compute_logits(self, last: Tensor) -> Tensor:
        return logits(last, self.lm_head)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids


class Eagle3Layer(nn.Module):
    """Attention reads the token's embedding and the hidden state; the residual stream is only the hidden state."""

    def __init__(self, name: str, draft: DraftConfig, weights: WeightFormat) -> None:
        super().__init__()
        config = draft.model
        size, norm = config.hidden_size, (config.hidden_size, config.rms_norm_eps, weights.placement)
        self.input_layernorm = RmsNorm(f"{name}.input_layernorm", *norm)
        self.hidden_norm = RmsNorm(f"{name}.hidden_norm", *norm)
        self.self_attn = Attention(name, config, 0, weights, in_features=2 * size)
        mlp = Mlp(name, config, weights)
        self.post_attention_layernorm = RmsNorm(f"{name}.post_attention_layernorm", *norm, mlp.reads)
        self.mlp = mlp
        self._norm_before_residual = draft.norm_before_residual

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm,
    ) -> tuple[Activations, Tensor]:
        """Return the stream after the layer, normed by `following`, and the stream itself."""
        normed = self.hidden_norm(hidden)
        both = Activations(torch.cat((self.input_layernorm(embeds), normed), dim=-1))
        stream = normed if self._norm_before_residual else hidden
        x, stream = self.self_attn.add_norm(both, stream, self.post_attention_layernorm, angles, attention)
        return self.mlp.add_norm(x, stream, following)

    def pieces(self) -> Iterator[Piece]:
        yield from self.input_layernorm.pieces()
        yield from self.hidden_norm.pieces()
        yield from self.self_attn.pieces()
        yield from self.post_attention_layernorm.pieces()
        yield from self.mlp.pieces()


class Eagle3Head(DraftModule):
    """EAGLE-3. Shares the target's embedding and LM head if it has none of its own.

    Args:
        own: EMBEDDING, LM_HEAD and D2T if the checkpoint has them. With a reduced vocabulary the head has its own
            LM head.
    """

    d2t: Tensor  # [draft vocabulary] int64, target id - draft id

    def __init__(
        self,
        draft: DraftConfig,
        target: CausalLM,
        placement: Placement,
        own: Collection[str] = (),
    ) -> None:
        super().__init__()
        config = draft.model
        size, norm = config.hidden_size, (config.rms_norm_eps, placement)
        weights = weight_format(config, placement)
        self.placement = placement
        self._own_embedding = EMBEDDING in own
        self._own_head = draft.reduced_vocab or LM_HEAD in own
        self._own_ids = draft.draft_vocab is not None and D2T in own
        self.embed_tokens = target.embed_tokens
        if self._own_embedding:
            self.embed_tokens = weights.embedding("embed_tokens", config.vocab_size, size)
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        width = DraftExtendInput.hidden_size_for(draft)
        parts = draft.fc_norms
        self.fc_norms = nn.ModuleList(RmsNorm(part, width // len(parts), *norm) for part in parts)
        self.fc = weights.linear(width, {"fc": size}, bias=False)
        self.midlayer = Eagle3Layer("midlayer", draft, weights)
        self.layers = nn.ModuleList(
            DecoderLayer(f"layers.{i}", config, i, weights) for i in range(1, config.num_layers)
        )
        self.norm = RmsNorm("norm", size, *norm)
        self._norm_output = draft.norm_output
        vocab = draft.draft_vocab or config.vocab_size
        self.lm_head = target.lm_head
        if self._own_head:
            self.lm_head = weights.head("lm_head", size, vocab)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64, device=placement.device))

    def project(self, target_hidden: Tensor) -> Tensor:
        if self.fc_norms:
            parts = target_hidden.chunk(len(self.fc_norms), dim=-1)
            target_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts)], dim=-1)
        return self.fc.product(Activations(target_hidden))

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        angles = self.rotary(positions)
        norms = [each.input_layernorm for each in self.layers if isinstance(each, DecoderLayer)] + [self.norm]
        x, stream = self.midlayer(embeds, hidden, angles, attention, norms[0])
        for layer, following in zip(self.layers, norms[1:], strict=True):
            x, stream = layer(x, stream, angles, attention, following)
        normed = x.tensor()
        return DraftOutput(normed, normed if self._norm_output else stream)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids]

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces it reads. Some files use other names, see draft_runner.py."""
        yield from self.fc.pieces()
        for each in self.fc_norms:
            assert isinstance(each, RmsNorm)
            yield from each.pieces()
        yield from self.midlayer.pieces()
        for each in self.layers:
            assert isinstance(each, DecoderLayer)
            yield from each.pieces()
        yield from self.norm.pieces()
        if self._own_embedding:
            yield from self.embed_tokens.pieces()
        if self._own_head:
            yield from self.lm_head.pieces()
        if self._own_ids:
            yield Piece.all_of(D2T, self.d2t)


class EagleLayer(nn.Module):
    """A Llama layer. The first layer of a head has no norm before attention, later ones have one."""

    def __init__(
        self, name: str, draft: DraftConfig, layer: int, weights: WeightFormat, input_norm: bool
    ) -> None:
        super().__init__()
        config = draft.model
        norm = (config.hidden_size, config.rms_norm_eps, weights.placement)
        self.self_attn = Attention(name, config, layer, weights)
        self.input_layernorm = RmsNorm(f"{name}.input_layernorm", *norm) if input_norm else None
        mlp = Mlp(name, config, weights)
        self.post_attention_layernorm = RmsNorm(f"{name}.post_attention_layernorm", *norm, mlp.reads)
        self.mlp = mlp

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        norm = self.post_attention_layernorm
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        normed, stream = self.self_attn.add_norm(Activations(read), x, norm, angles, attention)
        fed: Tensor = self.mlp(normed)
        return fed + stream

    def pieces(self) -> Iterator[Piece]:
        if self.input_layernorm is not None:
            yield from self.input_layernorm.pieces()
        yield from self.self_attn.pieces()
        yield from self.post_attention_layernorm.pieces()
        yield from self.mlp.pieces()


class EagleHead(DraftModule):
    """EAGLE-1/2: predicts the target's normed hidden state, from which the target's own head computes logits.

    Args:
        own: FC_BIAS if the checkpoint has it, and the norms before attention that it has in layers after the first.
    """

    def __init__(
        self,
        draft: DraftConfig,
        target: CausalLM,
        placement: Placement,
        own: Collection[str] = (),
    ) -> None:
        super().__init__()
        config = draft.model
        self.placement = placement
        self.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        self._config = config
        self._weights = weights = weight_format(config, placement)
        width = config.hidden_size + DraftExtendInput.hidden_size_for(draft)
        self.fc = weights.linear(width, {"fc": config.hidden_size}, FC_BIAS in own)
        self.layers = nn.ModuleList(
            EagleLayer(f"layers.{i}", draft, i, weights, i > 0 and input_norm(i) in own)
            for i in range(config.num_layers)
        )

    def own_embedding(self) -> Embedding:
        """Make an uninitialised embedding of its own."""
        return self._weights.embedding("embed_tokens", self._config.vocab_size, self._config.hidden_size)

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        angles = self.rotary(positions)
        x = self.fc.product(Activations(torch.cat((embeds, hidden), dim=-1)))
        for layer in self.layers:
            x = layer(x, angles, attention)
        return DraftOutput(x, x)

    def pieces(self) -> Iterator[Piece]:
        yield from self.fc.pieces()
        for each in self.layers:
            assert isinstance(each, EagleLayer)
            yield from each.pieces()
