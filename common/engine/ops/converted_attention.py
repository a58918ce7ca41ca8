"""Extend attention over FP8 pages that are first converted for all tiles of queries, where that pays off."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.converted_pages import converted_pages_triton
from common.engine.ops.extend_attention import extend_cuda, extend_reference, extend_triton
from common.engine.ops.fp8_codes import FP8
from common.engine.ops.registration import register_op

# Batches of up to this many tokens read FP8 pages as they are: a conversion takes two more launches per layer, which
# pays off only after thousands of cached tokens.
MIN_BATCH_TOKENS = 128
# The most bytes of one layer's converted pages; WORKING_BYTES of common.node.memory includes them.
CONVERTED_BYTES = 256 << 20


def converts(tokens: int, plane: Tensor, window: int | None) -> bool:
    """Return whether `converted_attention` computes a batch of `tokens` new tokens over planes like this one."""
    return plane.dtype is FP8 and window is None and tokens > MIN_BATCH_TOKENS


def room_for_pages(page: torch.Size, page_table: Tensor, dtype: torch.dtype) -> int:
    """Return how many pages of this shape are converted at most: those of CONVERTED_BYTES, or the whole table's."""
    return min(CONVERTED_BYTES // (2 * page.numel() * dtype.itemsize), page_table.numel())


def converted_attention_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    """Compute `extend_attention` without a window over planes in e4m3, whose scales are powers of two."""
    given = query, key_plane, value_plane, page_table, query_start, seq_lens
    return extend_reference(*given, None, scale, key_scale, value_scale)


def converted_attention_cuda(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    """Attend over converted pages, then for requests whose pages were not converted over the FP8 pages.

    Which requests these are is known on the device only, so both are launched, and the second one usually does nothing.
    """
    capacity = room_for_pages(key_plane.shape[1:], page_table, query.dtype)
    stored, scales = (key_plane, value_plane, page_table, query_start), (key_scale, value_scale)
    found = converted_pages_triton(*stored, seq_lens, *scales, query.dtype, capacity)
    read = found.keys, found.values, found.page_table, query_start, found.converted
    out = extend_cuda(query, *read, None, scale)
    return extend_triton(query, *stored, found.others, None, scale, *scales, out=out)


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


converted_attention = register_op(
    "converted_attention",
    converted_attention_reference,
    mutates=(),
    fake=_fake,
    cuda=converted_attention_cuda,
)
