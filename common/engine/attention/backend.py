"""What a model asks of attention: write this layer's keys and values, then attend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.engine.forward.batch import ForwardBatch


class AttentionBackend(Protocol):
    """plan / forward: everything that touches host data happens in `plan`, outside graphs."""

    def plan(self, batch: ForwardBatch) -> None:
        """Take a batch's metadata for the following `forward` calls, one per layer."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key, value [T, kv_heads, D] of the new tokens; attend query [T, heads, D], same shape."""
