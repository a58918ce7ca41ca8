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
from common.engine.formats.registry import weight_format
from common.engine.layers.activations import Activations
from common.engine.layers.attention import Attention
from common.engine.layers.linear import Embedding, WeightFormat, logits
from common.engine.layers.mlp import Mlp
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.layers.rotary import Rotary
from common.model_config import ModelConfig


class BodyOutput(NamedTuple):
    """What the body returns; every field is per token."""

    last: Tensor  # [T, H] after the final norm: what the LM head takes
    aux: (
        Tensor | None
    )  # [T, k * H] residual streams entering the k aux layers, side by side; None without any


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward around one residual stream.

    Args:
        name: what stands before the names of its tensors in the checkpoint.
        layer: index of its planes in the KV pool.
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, weights.placement)
        attention = Attention(f"{name}.self_attn", config, layer, weights)
        mlp = Mlp(f"{name}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias, weights)
        self.input_layernorm = RmsNorm(f"{name}.input_layernorm", *norm, attention.reads)
        self.self_attn = attention
        self.post_attention_layernorm = RmsNorm(f"{name}.post_attention_layernorm", *norm, mlp.reads)
        self.mlp = mlp

    def forward(
        self,
        x: Activations,
        stream: Tensor,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
        following: RmsNorm,
    ) -> tuple[Activations, Tensor]:
        """Run the layer.

        Args:
            x: the residual stream normed by `input_layernorm`.
            stream: [T, H].
            following: the norm of whatever comes next.

        Returns:
            The stream past the layer normed by `following`, and the stream: a product, what it is added to and the norm
            of the sum are one operation.
        """
        x, stream = self.self_attn.add_norm(x, stream, self.post_attention_layernorm, angles, attention)
        return self.mlp.add_norm(x, stream, following)

    def pieces(self) -> Iterator[Piece]:
        yield from self.input_layernorm.pieces()
        yield from self.self_attn.pieces()
        yield from self.post_attention_layernorm.pieces()
        yield from self.mlp.pieces()


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
        weights, size = weight_format(config, placement), config.hidden_size
        self.embed_tokens = Embedding("model.embed_tokens", config.vocab_size, size, placement)
        self.rotary = Rotary(config.rope, config.head_dim, placement)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{i}", config, i, weights) for i in range(config.num_layers)
        )
        self.norm = RmsNorm("model.norm", size, config.rms_norm_eps, placement)
        if config.tie_word_embeddings:
            self.lm_head = weights.tied_head(self.embed_tokens)
        else:
            self.lm_head = weights.linear(size, {"lm_head": config.vocab_size}, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]."""
        embeds: Tensor = self.embed_tokens(ids)
        return embeds

    def forward(self, embeds: Tensor, positions: Tensor, attention: AttentionBackend) -> BodyOutput:
        """The body: embeds [T, H], positions as in ForwardBatch. `attention` has planned the batch."""
        angles = self.rotary(positions)
        norms = [each.input_layernorm for each in self.layers if isinstance(each, DecoderLayer)] + [self.norm]
        stream, x = embeds, Activations(norms[0](embeds))
        aux: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                aux.append(stream)
            x, stream = layer(x, stream, angles, attention, norms[index + 1])
        if self.config.num_layers in self.aux_layers:
            aux.append(stream)
        return BodyOutput(x.tensor(), torch.cat(aux, dim=-1) if aux else None)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Rows of `BodyOutput.last` [R, H] -> [R, V] float32."""
        return logits(hidden, self.lm_head)

    def pieces(self) -> Iterator[Piece]:
        """(name in the checkpoint, view of our storage that it fills), each of our elements exactly once."""
        yield from self.embed_tokens.pieces()
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from layer.pieces()
        yield from self.norm.pieces()
        yield from self.lm_head.pieces()
