"""Converts the FP8 pages of long chunks to a dtype that the matrix units multiply, once for all tiles of queries.

Extend attention over FP8 pages converts keys and values once per tile of queries. A long chunk has many tiles, and one
copy costs less. Which requests are converted is decided on the device, so that a graph serves all lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, decode, has_fp8
from common.engine.ops.kv_rounding import as_read, selected
from common.engine.ops.paged_attention import check_starts
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    multiprocessors,
    next_power_of_2,
    tl,
)

BLOCK = 4096  # values that a program converts at a time
PROGRAMS_PER_PROCESSOR = 8
MIN_TOKENS = 32  # pages of requests with so few new tokens are not converted; measured on an H200


class ConvertedPages(NamedTuple):
    """Pages of a batch of B requests after conversion. Pages and entries of no converted request are undefined."""

    keys: Tensor  # [capacity, page_size, kv_heads, D], times their scale
    values: Tensor
    page_table: Tensor  # [B, max_pages] int32, of converted requests in these planes
    converted: Tensor  # [B] int32, the lengths of converted requests; 0 for others
    others: Tensor  # [B] int32, the lengths of the others; 0 for converted ones


def converted_pages_reference(
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    key_scale: float,
    value_scale: float,
    dtype: torch.dtype,
    capacity: int,
) -> ConvertedPages:
    """Convert the pages of requests with over MIN_TOKENS new tokens, one request after another, while there is room.

    Args:
        keys, values: planes [num_pages, page_size, kv_heads, D] in e4m3.
        page_table: [B, max_pages] int32.
        query_start: [B + 1] int32, prefix sums of new tokens.
        seq_lens: [B] int32, including new tokens.
        key_scale, value_scale: powers of two.
        dtype: of the result.
        capacity: pages for which there is room. The first request that does not fit ends the conversion.
    """
    page_size = keys.shape[1]
    planes = keys.new_zeros((2, capacity, *keys.shape[1:]), dtype=dtype)
    table, converted, others = torch.zeros_like(page_table), torch.zeros_like(seq_lens), seq_lens.clone()
    starts, used, full = query_start.tolist(), 0, False
    for row, length in enumerate(seq_lens.tolist()):
        count = cdiv(length, page_size) if starts[row + 1] - starts[row] > MIN_TOKENS else 0
        full = full or used + count > capacity
        if full or count == 0:
            continue
        converted[row], others[row] = length, 0
        table[row, :count] = torch.arange(used, used + count)
        for each, (plane, scale) in enumerate(((keys, key_scale), (values, value_scale))):
            planes[each, used : used + count] = as_read(
                selected(plane, page_table[row, :count]), dtype, scale
            )
        used += count
    return ConvertedPages(planes[0], planes[1], table, converted, others)


@kernel_with_varying("num_requests", "table_stride", "max_pages", "capacity")
def _converted_pages_kernel(  # type: ignore[no-untyped-def]
    keys_ptr,  # [num_pages, SIZE] codes
    values_ptr,
    table_ptr,  # [B, max_pages]
    start_ptr,  # [B + 1]
    lens_ptr,  # [B]
    out_ptr,  # [2, capacity, SIZE]
    new_table_ptr,  # [B, max_pages]
    converted_ptr,  # [B]
    others_ptr,  # [B]
    num_requests,
    table_stride,
    max_pages,
    capacity,
    key_scale,
    value_scale,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    DECODED: tl.constexpr,  # codes are bytes
    BLOCK_B: tl.constexpr,  # at least num_requests
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Convert blocks of BLOCK keys and values of a page; program p of P converts the blocks p, p + P, p + 2 P ..."""
    await_previous(CHAINED)
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK  # of a page
    index = tl.arange(0, BLOCK_B)
    known = index < num_requests
    starts = tl.load(start_ptr + index, mask=known, other=0)
    stops = tl.load(start_ptr + index + 1, mask=known, other=0)
    lengths = tl.load(lens_ptr + index, mask=known, other=0)
    wanted = tl.where(stops - starts > MIN_TOKENS, tl.cdiv(lengths, PAGE_SIZE), 0)
    upto = tl.cumsum(wanted, axis=0)  # pages of requests 0 .. index
    converted = (wanted > 0) & (upto <= capacity)
    if tl.program_id(0) == 0:
        tl.store(converted_ptr + index, tl.where(converted, lengths, 0), mask=known)
        tl.store(others_ptr + index, tl.where(converted, 0, lengths), mask=known)
    pages = tl.sum(tl.where(converted, wanted, 0), axis=0)
    dtype = out_ptr.dtype.element_ty
    for block in range(tl.program_id(0), pages * BLOCKS, tl.num_programs(0)):
        page, part = block // BLOCKS, block % BLOCKS
        request = tl.sum((upto <= page).to(tl.int32), axis=0)
        before = tl.sum(tl.where(index < request, wanted, 0), axis=0)
        entry = page - before
        found = tl.load(table_ptr + request.to(tl.int64) * table_stride + entry)
        if part == 0:
            tl.store(new_table_ptr + request.to(tl.int64) * max_pages + entry, page)
        place = part * BLOCK + tl.arange(0, BLOCK)
        live = place < SIZE
        source = found.to(tl.int64) * SIZE + place
        keys = tl.load(keys_ptr + source, mask=live, other=0.0)
        values = tl.load(values_ptr + source, mask=live, other=0.0)
        if DECODED:
            keys = decode(keys)
            values = decode(values)
        target = out_ptr + tl.cast(page, tl.int64) * SIZE + place
        tl.store(target, (keys.to(tl.float32) * key_scale).to(dtype), mask=live)
        target += tl.cast(capacity, tl.int64) * SIZE
        tl.store(target, (values.to(tl.float32) * value_scale).to(dtype), mask=live)


def converted_pages_triton(
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    key_scale: float,
    value_scale: float,
    dtype: torch.dtype,
    capacity: int,
) -> ConvertedPages:
    assert keys.dtype == values.dtype == FP8, f"planes of {keys.dtype} and {values.dtype}"
    assert keys.is_contiguous(), "planes must be contiguous"
    assert values.is_contiguous(), "planes must be contiguous"
    assert keys.shape == values.shape, "planes of different shapes"
    assert page_table.stride(1) == 1, "entries of a request must be adjacent"
    (batch, max_pages), page = page_table.shape, keys.shape[1:]
    check_starts(query_start, batch)
    assert seq_lens.shape == (batch,), f"{len(seq_lens)} lengths for {batch} requests"
    assert seq_lens.is_contiguous(), "lengths must be contiguous"
    out = keys.new_empty((2, capacity, *page), dtype=dtype)
    table = page_table.new_empty((batch, max_pages))
    # Not rows of one tensor: a kernel is compiled again for a pointer that is not aligned.
    lengths = torch.empty_like(seq_lens), torch.empty_like(seq_lens)
    decoded, size = not has_fp8(keys.device), page.numel()
    planes = (keys.view(torch.uint8), values.view(torch.uint8)) if decoded else (keys, values)
    most = PROGRAMS_PER_PROCESSOR * multiprocessors(keys.device)
    programs = min(max(capacity * cdiv(size, BLOCK), 1), most)
    _converted_pages_kernel[(programs,)](
        *planes,
        page_table,
        query_start,
        seq_lens,
        out,
        table,
        *lengths,
        batch,
        page_table.stride(0),
        max_pages,
        capacity,
        key_scale,
        value_scale,
        PAGE_SIZE=page[0],
        SIZE=size,
        MIN_TOKENS=MIN_TOKENS,
        DECODED=decoded,
        BLOCK_B=max(next_power_of_2(batch), 64),
        BLOCK=BLOCK,
        num_warps=4,
        **chained(keys.device),
    )
    return ConvertedPages(out[0], out[1], table, *lengths)
