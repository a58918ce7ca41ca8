"""Attention that reports each layer once its keys and values are in the pool, for work that need not wait for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from common.engine.attention.backend import AttentionBackend
from prefill_node.around_attention import AroundAttention


class SignalledAttention(AroundAttention):
    """Calls a listener per layer. A replay without breaks calls it for no layer."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self._listener: Callable[[int], None] | None = None

    @contextmanager
    def heard_by(self, listener: Callable[[int], None]) -> Iterator[None]:
        """Call `listener` in this context with each layer before the layer attends.

        On a device the launched work stores the layer, so it may not be complete yet.
        """
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._listener is not None:
            self._listener(layer)
        return super().forward(layer, query, key, value)

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        """Run the operation, which stores its state, and then call the listener."""
        mixed = super().mix(layer, operation, projected, width, weights, eps)
        if self._listener is not None:
            self._listener(layer)
        return mixed
