"""The attention block of a decoder layer; the backend does rotation, cache and attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece


class Attention(Mixer):
    """Multi-head attention between its two projections.

    Args:
        in_features: width of its input; None: the model's width.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        layer: int,
        weights: WeightFormat,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        name, self.layer = f"{name}.self_attn", layer
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        self.qkv_proj = weights.linear(in_features or config.hidden_size, parts, config.qkv_bias)
        self.o_proj = weights.linear(q_size, {f"{name}.o_proj": config.hidden_size}, config.output_bias)
        norm = (config.head_dim, config.rms_norm_eps, weights.placement)
        self.q_norm = RmsNorm(f"{name}.q_norm", *norm) if config.qk_norm else None
        self.k_norm = RmsNorm(f"{name}.k_norm", *norm) if config.qk_norm else None
        self.reads = self.qkv_proj.reads

    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        return self.o_proj.add_norm(Activations(self._attend(x, angles, attention)), stream, norm)

    def _attend(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """Return what `o_proj` reads: [T, heads * D].

        A method of its own, so that queries, keys and values are freed before `o_proj` allocates: they would add 64 MiB
        to the graphs of 8,192 tokens.
        """
        qkv = self.qkv_proj.product(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        attention.store(self.layer, qkv, angles, *self._norm_weights())
        query, new = qkv[:, : self.heads], qkv[:, self.heads :]
        key, value = new.chunk(2, dim=1)
        return attention.forward(self.layer, query, key, value).flatten(-2)

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None, float]:
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def pieces(self) -> Iterator[Piece]:
        yield from self.qkv_proj.pieces()
        yield from self.o_proj.pieces()
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.pieces()
            yield from self.k_norm.pieces()
