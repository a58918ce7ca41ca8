"""Wraps an attention backend, for backends that only change what `forward` or `mix` does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from common.engine.attention.backend import AttentionBackend, TokenSlots
from common.engine.forward.batch import ForwardBatch


class AroundAttention:
    """An `AttentionBackend` that passes every call to an inner one."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner

    def plan(self, batch: ForwardBatch) -> None:
        self._inner.plan(batch)

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        self._inner.store(layer, qkv, angles, q_weight, k_weight, eps)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._inner.forward(layer, query, key, value)

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        return self._inner.mix(layer, operation, projected, width, weights, eps)

    def token_slots(self) -> TokenSlots | None:
        return self._inner.token_slots()
