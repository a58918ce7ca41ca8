"""Attention that says of each layer when its keys and values are in the pool: for what need not wait for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from common.engine.attention.backend import AttentionBackend
from common.engine.forward.batch import ForwardBatch


class SignalledAttention:
    """An `AttentionBackend` around another one. Where a graph has no breaks, replay says nothing."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self._listener: Callable[[int], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Within, it is told each layer before the layer attends: on a device, stored by what has been launched."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

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
        if self._listener is not None:
            self._listener(layer)
        return self._inner.forward(layer, query, key, value)
