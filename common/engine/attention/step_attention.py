"""Attention of decode nodes: kernels of their own for decode steps and for trees, besides that of prompts."""

from __future__ import annotations

from torch import Tensor

from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import ForwardBatch, ForwardMode
from common.engine.ops.decode_attention import decode_attention
from common.engine.ops.extend_attention import extend_attention
from common.engine.ops.verify_attention import verify_attention


class StepAttention(PagedAttention):
    """PagedAttention for batches of every mode."""

    def _attend(
        self, batch: ForwardBatch, query: Tensor, keys: Tensor, values: Tensor, window: int | None
    ) -> Tensor:
        return attend_pages(batch, query, keys, values, window, self._scale)


def attend_pages(
    batch: ForwardBatch, query: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float
) -> Tensor:
    """Attend query [T, heads, D] over planes [num_pages, page_size, kv_heads, D] that hold the batch's new tokens."""
    table, lengths, longest = batch.page_table, batch.seq_lens, batch.max_seq_len
    if batch.mode is ForwardMode.DECODE:
        out: Tensor = decode_attention(query, keys, values, table, lengths, longest, window, scale)
    elif batch.tree_mask is not None:
        tree = batch.tree_mask
        out = verify_attention(query, keys, values, table, lengths, tree, longest, window, scale)
    else:
        out = extend_attention(query, keys, values, table, batch.query_start, lengths, window, scale)
    return out
