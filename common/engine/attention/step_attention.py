"""Attention of decode nodes: kernels of their own for decode steps and for trees, besides that of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention
from common.engine.ops.extend_attention import extend_attention
from common.engine.ops.rotary_decode import NewTokens, fuses_rotation, rotary_decode
from common.engine.ops.verify_attention import verify_attention
from common.engine.state.pool import KvPool


class StepAttention(PagedAttention):
    """PagedAttention for batches of every mode.

    In a decode step `store` may leave its work to the kernel of `forward` of the same layer.
    """

    def __init__(self, pool: KvPool, windows: Sequence[int | None], scale: float | None = None) -> None:
        super().__init__(pool, windows, scale)
        self._unstored: tuple[int, Tensor, NewTokens] | None = None

    def store(
        self,
        layer: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
    ) -> None:
        batch = self._planned()
        if batch.mode is ForwardMode.DECODE and fuses_rotation(qkv):
            self._unstored = layer, qkv, NewTokens(*angles, q_weight, k_weight, eps, batch.kv_slots)
        else:
            super().store(layer, qkv, angles, q_weight, k_weight, eps)

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._unstored is None:
            return super().forward(layer, query, key, value)
        (stored_layer, qkv, new), self._unstored = self._unstored, None
        assert stored_layer == layer, f"layer {stored_layer} was stored, layer {layer} attends"
        batch, planes = self._planned(), (self.pool.key(layer), self.pool.value(layer))
        lengths, window = (batch.seq_lens, batch.max_seq_len), self._windows[layer]
        scales = self._scale, *self.pool.scales(layer)
        return rotary_decode(qkv, *new, *planes, batch.page_table, *lengths, window, *scales)

    def _attend(self, batch: ForwardBatch, query: Tensor, layer: int) -> Tensor:
        pool = self.pool
        planes = StoredPlanes(pool.key(layer), pool.value(layer), *pool.scales(layer))
        return attend_pages(batch, query, planes, self._windows[layer], self._scale)


class StoredPlanes(NamedTuple):
    """Keys and values [num_pages, page_size, kv_heads, D], and what they are multiplied by."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


def attend_pages(
    batch: ForwardBatch, query: Tensor, planes: StoredPlanes, window: int | None, scale: float
) -> Tensor:
    """Attend query [T, heads, D] over planes that hold the batch's new tokens."""
    table, lengths, longest = batch.page_table, batch.seq_lens, batch.max_seq_len
    keys, values, *scales = planes
    if batch.mode is ForwardMode.DECODE:
        out: Tensor = decode_attention(query, keys, values, table, lengths, longest, window, scale, *scales)
    elif batch.tree_mask is not None:
        tree = batch.tree_mask
        out = verify_attention(query, keys, values, table, lengths, tree, longest, window, scale, *scales)
    else:
        out = extend_attention(query, keys, values, table, batch.query_start, lengths, window, scale, *scales)
    return out
