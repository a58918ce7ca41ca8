"""The attention block of a decoder layer up to its output projection; rotary, cache and attention are the backend's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.attention.backend import AttentionBackend
from common.engine.layers.linear import Linear
from common.engine.layers.norm import RmsNorm
from common.engine.layers.placement import Placement
from common.model_config import ModelConfig


class Attention(nn.Module):
    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, in_features: int | None = None
    ) -> None:
        super().__init__()
        self.layer = layer  # index of this layer's planes in the KV pool
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(in_features or config.hidden_size, parts, config.qkv_bias, placement)
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, config.output_bias, placement)
        norm = (config.head_dim, config.rms_norm_eps, placement)
        self.q_norm = RmsNorm(*norm) if config.qk_norm else None
        self.k_norm = RmsNorm(*norm) if config.qk_norm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        """x [T, H] -> [T, heads * D], what `o_proj` reads; angles are (cos, sin) of `layers/rotary`."""
        qkv: Tensor = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, heads + 2 * kv_heads, D]
        attention.store(self.layer, qkv, angles, *self._norm_weights())
        query, new = qkv[:, : self.heads], qkv[:, self.heads :]
        key, value = new.chunk(2, dim=1)
        return attention.forward(self.layer, query, key, value).flatten(-2)

    def _norm_weights(self) -> tuple[Tensor | None, Tensor | None, float]:
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv_proj.checkpoint_tensors(prefix)
        yield from self.o_proj.checkpoint_tensors(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.checkpoint_tensors(f"{prefix}.q_norm")
            yield from self.k_norm.checkpoint_tensors(f"{prefix}.k_norm")
