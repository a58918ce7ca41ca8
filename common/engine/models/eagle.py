"""The draft heads of EAGLE-1/2 and EAGLE-3: one decoder layer that reads the target's hidden states.

Row t pairs the hidden state behind token t with the embedding of token t + 1, stands at position t, and predicts token
t + 2. Where the target has not computed a hidden state yet, a row takes the one that the draft gave for the row before.
Sources: arXiv 2401.15077, 2503.01840.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from common.draft_config import DraftConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.forward.draft_inputs import EagleDraftExtendInput
from common.engine.layers.attention import Attention
from common.engine.layers.linear import Embedding, Linear, logits
from common.engine.layers.mlp import Mlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement, parameter
from common.engine.layers.rotary import Rotary
from common.engine.models.llama import DecoderLayer, LlamaForCausalLM

EMBEDDING, LM_HEAD, FC_BIAS = "embed_tokens.weight", "lm_head.weight", "fc.bias"  # what a checkpoint may have


class DraftOutput(NamedTuple):
    """Per row."""

    last: Tensor  # [T, H] what the head reads
    hidden: Tensor  # [T, H] what the next step reads


class DraftHead(Protocol):
    """What prefill and decode ask of a draft model."""

    def project(self, target_hidden: Tensor) -> Tensor:
        """Hidden states of the target [T, EagleDraftExtendInput.hidden_size_for] as a step reads them [T, H]."""
        ...

    def forward(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput: ...

    def compute_logits(self, last: Tensor) -> Tensor:
        """[R, H] -> [R, draft vocabulary] float32."""
        ...

    def target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary as ids of the target's."""
        ...


class SplitHead(DraftHead, Protocol):
    """A draft model whose embedding may run apart from its layers: graphs hold the layers alone."""

    placement: Placement

    def embed(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        ...

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        """`forward` behind `embed`."""
        ...


class DraftModule(nn.Module, ABC):
    """What heads have in common: they take the target's hidden states as they are, and draft in its vocabulary."""

    placement: Placement
    embed_tokens: Embedding  # [V, H]
    lm_head: Tensor

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
    """Attention reads the token's embedding beside the hidden state; the residual stream is the hidden state alone."""

    def __init__(self, draft: DraftConfig, placement: Placement) -> None:
        super().__init__()
        config = draft.model
        norm = (config.hidden_size, config.rms_norm_eps, placement)
        self.input_layernorm, self.hidden_norm = RmsNorm(*norm), RmsNorm(*norm)
        self.self_attn = Attention(config, 0, placement, in_features=2 * config.hidden_size)
        self.post_attention_layernorm = RmsNorm(*norm)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, config.mlp_bias, placement)
        self._norm_before_residual = draft.norm_before_residual

    def forward(
        self,
        embeds: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm,
    ) -> tuple[Tensor, Tensor]:
        """(the stream behind the layer normed by `following`, the stream)."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        stream = normed if self._norm_before_residual else hidden
        heads = self.self_attn(both, angles, attention)
        normed, stream = self.post_attention_layernorm.behind(self.self_attn.o_proj, heads, stream)
        return following.behind(self.mlp.down_proj, self.mlp.gated(normed), stream)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_layernorm.checkpoint_tensors(f"{prefix}.input_layernorm")
        yield from self.hidden_norm.checkpoint_tensors(f"{prefix}.hidden_norm")
        yield from self.self_attn.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_tensors(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")


class Eagle3Head(DraftModule):
    """EAGLE-3. Shares the target's embedding and LM head where it has none of its own.

    Args:
        own: EMBEDDING and LM_HEAD where the checkpoint has them. With a reduced vocabulary the LM head is its own.
    """

    d2t: Tensor  # [draft vocabulary] int64, target id - draft id

    def __init__(
        self,
        draft: DraftConfig,
        target: LlamaForCausalLM,
        placement: Placement,
        own: Collection[str] = (),
    ) -> None:
        super().__init__()
        config = draft.model
        size, norm = config.hidden_size, (config.rms_norm_eps, placement)
        self.placement = placement
        self._own_embedding, self._own_head = (
            EMBEDDING in own,
            draft.draft_vocab is not None or LM_HEAD in own,
        )
        self.embed_tokens = target.embed_tokens
        if self._own_embedding:
            self.embed_tokens = Embedding(config.vocab_size, size, placement)
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        width = EagleDraftExtendInput.hidden_size_for(draft)
        parts = draft.fc_norms
        self._fc_norm_names = parts
        self.fc_norms = nn.ModuleList(RmsNorm(width // len(parts), *norm) for _ in parts)
        self.fc = Linear(width, {"fc": size}, False, placement)
        self.midlayer = Eagle3Layer(draft, placement)
        self.layers = nn.ModuleList(DecoderLayer(config, i, placement) for i in range(1, config.num_layers))
        self.norm = RmsNorm(size, *norm)
        self._norm_output = draft.norm_output
        vocab = draft.draft_vocab or config.vocab_size
        self.lm_head = parameter((vocab, size), placement) if self._own_head else target.lm_head
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64, device=placement.device))

    def project(self, target_hidden: Tensor) -> Tensor:
        if self.fc_norms:
            parts = target_hidden.chunk(len(self.fc_norms), dim=-1)
            target_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts)], dim=-1)
        projected: Tensor = self.fc(target_hidden)
        return projected

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        angles = self.rotary(positions)
        norms = [each.input_layernorm for each in self.layers if isinstance(each, DecoderLayer)] + [self.norm]
        normed, stream = self.midlayer(embeds, hidden, angles, attention, norms[0])
        for layer, following in zip(self.layers, norms[1:], strict=True):
            normed, stream = layer(normed, stream, angles, attention, following)
        return DraftOutput(normed, normed if self._norm_output else stream)

    def target_ids(self, ids: Tensor) -> Tensor:
        return ids + self.d2t[ids]

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Some files have other names: draft_runner.py."""
        yield "fc.weight", self.fc.weight
        for name, each in zip(self._fc_norm_names, self.fc_norms, strict=True):
            assert isinstance(each, RmsNorm)
            yield from each.checkpoint_tensors(name)
        yield from self.midlayer.checkpoint_tensors("midlayer")
        for index, each in enumerate(self.layers, start=1):
            assert isinstance(each, DecoderLayer)
            yield from each.checkpoint_tensors(f"layers.{index}")
        yield from self.norm.checkpoint_tensors("norm")
        if self._own_embedding:
            yield EMBEDDING, self.embed_tokens.weight
        if self._own_head:
            yield LM_HEAD, self.lm_head


class EagleLayer(nn.Module):
    """A Llama layer without a norm before attention."""

    def __init__(self, draft: DraftConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        config = draft.model
        self.self_attn = Attention(config, layer, placement)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, config.mlp_bias, placement)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        heads = self.self_attn(x, angles, attention)
        normed, stream = self.post_attention_layernorm.behind(self.self_attn.o_proj, heads, x)
        mixed: Tensor = self.mlp(normed)
        return mixed + stream

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.self_attn.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_tensors(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")


class EagleHead(DraftModule):
    """EAGLE-1/2: regresses the target's normed hidden state, which the target's own head reads.

    Args:
        own: FC_BIAS where the checkpoint has it.
    """

    def __init__(
        self,
        draft: DraftConfig,
        target: LlamaForCausalLM,
        placement: Placement,
        own: Collection[str] = (),
    ) -> None:
        super().__init__()
        config = draft.model
        self.placement = placement
        self.embed_tokens = target.embed_tokens
        self.lm_head = target.lm_head
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        width = config.hidden_size + EagleDraftExtendInput.hidden_size_for(draft)
        self.fc = Linear(width, {"fc": config.hidden_size}, FC_BIAS in own, placement)
        self.layers = nn.ModuleList(EagleLayer(draft, i, placement) for i in range(config.num_layers))

    def body(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> DraftOutput:
        angles = self.rotary(positions)
        x: Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
        for layer in self.layers:
            x = layer(x, angles, attention)
        return DraftOutput(x, x)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "fc.weight", self.fc.weight
        if self.fc.bias is not None:
            yield FC_BIAS, self.fc.bias
        for index, each in enumerate(self.layers):
            assert isinstance(each, EagleLayer)
            yield from each.checkpoint_tensors(f"layers.{index}")
