"""The progress mark: tells the host, without synchronization, how far the target's forward of a step has come.

Some layers before the end write a count to host memory (common/engine/ops/write_mark.py). Graphs record these writes,
and eager steps and the CPU make them too. Every step of a node runs the target once, so every step raises the count by
the same number.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from common.engine.attention.step_attention import StepAttention
from common.engine.ops.write_mark import write_mark
from common.engine.state.pool import KvPool

# The layers that write, counted from the end. What follows them, with the LM head and the draws, takes from less than a
# tenth to half of a step, and each write takes a microsecond or two.
LAYERS_LEFT = (16, 12, 9, 6, 4, 2, 1)


class ProgressMark:
    """The count of one node's target, and the layers that raise it.

    Args:
        writing: the layers that reach the attention backend; others keep nothing in the pool and cannot write.
    """

    def __init__(self, num_layers: int, writing: Container[int], device: torch.device) -> None:
        chosen = (num_layers - left for left in LAYERS_LEFT if left <= num_layers)
        self.layers = tuple(layer for layer in chosen if layer in writing)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host = self._seen.numpy()

    def write_at(self, layer: int) -> None:
        """Write from within a forward, if this layer is to do so."""
        if layer in self.layers:
            write_mark(self._count, self._seen)

    @property
    def value(self) -> int:
        """The count so far. Does not wait for the device."""
        return int(self._host[0])


class ProgressAttention(StepAttention):
    """The attention of a target whose forwards write the progress mark."""

    def __init__(
        self, pool: KvPool, windows: Sequence[int | None], scale: float | None, mark: ProgressMark
    ) -> None:
        super().__init__(pool, windows, scale)
        self._mark = mark

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        self._mark.write_at(layer)
        super().store(layer, qkv, angles, q_weight, k_weight, eps)

    def mix(
        self,
        layer: int,
        operation: str,
        projected: Tensor,
        width: int,
        weights: Sequence[Tensor] = (),
        eps: float = 0.0,
    ) -> Tensor:
        self._mark.write_at(layer)
        return super().mix(layer, operation, projected, width, weights, eps)
