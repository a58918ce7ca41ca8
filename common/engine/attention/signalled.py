"""Attention that says of each layer when its keys and values are in the pool: for what need not wait for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from common.engine.attention.around import AroundAttention
from common.engine.attention.backend import AttentionBackend


class SignalledAttention(AroundAttention):
    """Where a graph has no breaks, replay says nothing."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self._listener: Callable[[int], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Within, it is told each layer before the layer attends: on a device, stored by what has been launched."""
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._listener is not None:
            self._listener(layer)
        return super().forward(layer, query, key, value)
