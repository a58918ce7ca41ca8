"""The interface between models and attention: store this layer's keys and values, then attend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.engine.forward.batch import ForwardBatch


class AttentionBackend(Protocol):
    """plan / store / forward. All work on host data happens in `plan`, outside graphs."""

    def plan(self, batch: ForwardBatch) -> None:
        """Take a batch's metadata for the following calls, one store and one forward per layer."""

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        """Normalise and rotate the queries and keys of qkv [T, heads + 2 * kv_heads, D] in place and store keys and
        values.

        They are stored in the batch's `kv_slots` of this layer. Graphs record this call: see `ops/rotary_kv_write`.
        """

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend query [T, heads, D] over the stored keys; return the same shape. Graphs break here.

        key, value: [T, kv_heads, D], already stored; passed for kernels that read new tokens directly.
        """
