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
from common.engine.ops.step_plans import plan_decode, plan_verify
from common.engine.ops.verify_attention import verify_attention
from common.engine.state.pool import KvPool


class StepAttention(PagedAttention):
    """PagedAttention for batches of every mode.

    In a decode step `store` may leave its work to the kernel of `forward` of the same layer.
    """

    def __init__(self, pool: KvPool, windows: Sequence[int | None], scale: float | None = None) -> None:
        super().__init__(pool, windows, scale)
        self._unstored: tuple[int, Tensor, NewTokens] | None = None
        self._plans: dict[int | None, Tensor | None] = {}  # of the batch's layers, by window

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._plans = {}

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
        pool, window = self.pool, self._windows[layer]
        planes = StoredPlanes(pool.key(layer), pool.value(layer), *pool.scales(layer))
        if window not in self._plans:
            self._plans[window] = plan_pages(batch, query, planes.keys, window)
        return attend_pages(batch, query, planes, window, self._scale, self._plans[window])


class StoredPlanes(NamedTuple):
    """Keys and values [num_pages, page_size, kv_heads, D], and what they are multiplied by."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


def plan_pages(batch: ForwardBatch, query: Tensor, keys: Tensor, window: int | None) -> Tensor | None:
    """Return the plan with which `attend_pages` attends on a GPU; None if it needs none."""
    lengths, longest = batch.seq_lens, batch.max_seq_len
    if not query.is_cuda or len(query) == 0:
        return None
    if batch.mode is ForwardMode.DECODE:
        return plan_decode(query, keys, lengths, longest, window)
    if batch.tree_mask is not None:
        return plan_verify(query, keys, lengths, batch.tree_mask, longest, window)
    return None


def attend_pages(
    batch: ForwardBatch,
    query: Tensor,
    planes: StoredPlanes,
    window: int | None,
    scale: float,
    plan: Tensor | None = None,
) -> Tensor:
    """Attend query [T, heads, D] over planes that hold the batch's new tokens.

    Args:
        plan: `plan_pages` of the batch, for any layer with this window.
    """
    table, lengths, longest = batch.page_table, batch.seq_lens, batch.max_seq_len
    pages, scales = (planes.keys, planes.values, table), (scale, planes.key_scale, planes.value_scale)
    if batch.mode is ForwardMode.DECODE:
        out: Tensor = decode_attention(query, *pages, lengths, longest, window, *scales, plan)
    elif batch.tree_mask is not None:
        out = verify_attention(query, *pages, lengths, batch.tree_mask, longest, window, *scales, plan)
    else:
        out = extend_attention(query, *pages, batch.query_start, lengths, window, *scales)
    return out
