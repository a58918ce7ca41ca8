"""The dense pre-norm decoder of Llama, Mistral, Qwen2 and Qwen3; they differ by `ModelConfig` options alone.

Three parts that a caller may run apart: `embed`, the body (`forward`), `compute_logits`. Graphs capture the
body only; attention is its single operation that knows requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.engine.attention.backend import AttentionBackend
from common.engine.layers.attention import Attention
from common.engine.layers.linear import Embedding, logits
from common.engine.layers.mlp import Mlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement, parameter
from common.engine.layers.rotary import Rotary
from common.model_config import ModelConfig


class BodyOutput(NamedTuple):
    """What the body returns; every field is per token."""

    last: Tensor  # [T, H] after the final norm: what the LM head takes
    aux: (
        Tensor | None
    )  # [T, k * H] residual streams entering the k aux layers, side by side; None without any


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward around one residual stream."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.self_attn = Attention(config, layer, placement)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, config.mlp_bias, placement)

    def forward(
        self,
        normed: Tensor,
        stream: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, H] and, `normed` by `input_layernorm`, what attention reads of it.

        Returns the same of the stream behind the layer, normed by `following`: a product, what it is added to and the
        norm of the sum are one operation.
        """
        heads = self.self_attn(normed, angles, attention)
        normed, stream = self.post_attention_layernorm.behind(self.self_attn.o_proj, heads, stream)
        return following.behind(self.mlp.down_proj, self.mlp.gated(normed), stream)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_layernorm.checkpoint_tensors(f"{prefix}.input_layernorm")
        yield from self.self_attn.checkpoint_tensors(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.checkpoint_tensors(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.checkpoint_tensors(f"{prefix}.mlp")


class LlamaForCausalLM(nn.Module):
    """A decoder with embedding and LM head; parameters are uninitialised until `weights.load_weights`.

    Args:
        aux_layers: layer boundaries, ascending, 0 .. num_layers: i is the residual stream entering layer i,
            num_layers the one behind the last layer, before the final norm.
    """

    def __init__(self, config: ModelConfig, placement: Placement, aux_layers: Sequence[int] = ()) -> None:
        super().__init__()
        if list(aux_layers) != sorted(set(aux_layers)) or not all(
            0 <= i <= config.num_layers for i in aux_layers
        ):
            raise ValueError(
                f"aux layers {tuple(aux_layers)} are not ascending boundaries of {config.num_layers} layers"
            )
        self.config = config
        self.placement = placement
        self.aux_layers = tuple(aux_layers)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, placement)
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        self.layers = nn.ModuleList(DecoderLayer(config, i, placement) for i in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, placement)
        shape = (config.vocab_size, config.hidden_size)
        self.lm_head = self.embed_tokens.weight if config.tie_word_embeddings else parameter(shape, placement)

    def embed(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        embeds: Tensor = self.embed_tokens(ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        """The body: embeds [T, H], positions as in ForwardBatch. `attention` has planned the batch."""
        angles = self.rotary(positions)
        norms = [each.input_layernorm for each in self.layers if isinstance(each, DecoderLayer)] + [self.norm]
        stream, normed = embeds, norms[0](embeds)
        aux: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                aux.append(stream)
            normed, stream = layer(normed, stream, angles, attention, norms[index + 1])
        if self.config.num_layers in self.aux_layers:
            aux.append(stream)
        return BodyOutput(normed, torch.cat(aux, dim=-1) if aux else None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `BodyOutput.last` [R, H] -> [R, V] float32."""
        return logits(hidden, self.lm_head)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, view of our storage that it fills), each of our elements exactly once."""
        yield "model.embed_tokens.weight", self.embed_tokens.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint_tensors(f"model.layers.{index}")
        yield from self.norm.checkpoint_tensors("model.norm")
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head
