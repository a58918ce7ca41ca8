"""What a model asks of attention: keep this layer's keys and values, then attend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.engine.forward.batch import ForwardBatch


class AttentionBackend(Protocol):
    """plan / store / forward: everything that touches host data happens in `plan`, outside graphs."""

    def plan(self, batch: ForwardBatch) -> None:
        """Take a batch's metadata for the following calls, one pair per layer."""

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        """Normalise and rotate the queries and keys of qkv [T, heads + 2 * kv_heads, D] in place, and keep this
        layer's keys and values in the batch's `kv_slots`. Graphs record it: see `ops/rotary_kv_write`."""

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend query [T, heads, D] over what is stored; returns the same shape. Where graphs break.

        key, value: [T, kv_heads, D], stored already: for kernels that read new tokens from here.
        """
