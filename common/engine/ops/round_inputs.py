"""The inputs that a phase of a speculative round reads before its forward: rows of device state, slots of new tokens.

Each is a handful of integers per request, for which torch would need nine launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

BLOCK = 1024  # pages per program


def gather_rows_reference(
    placed: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather the state of R requests, which has one row per request.

    Args:
        placed: [R, 2] int64: the request's row, and the number of pages that it holds.
        last_token: [rows] int64.
        seq_len: [rows] int32.
        rope_delta: [rows] int64.
        pages: [rows, W] int32.

    Returns (last token [R] int64, length [R] int64, rope delta [R] int64, page table [R, W] int32, with page 0 past
    the pages held).
    """
    rows, held = placed[:, 0], placed[:, 1]
    own = torch.arange(pages.shape[1], device=pages.device) < held[:, None]
    return (
        last_token.index_select(0, rows),
        seq_len.index_select(0, rows).to(torch.int64),
        rope_delta.index_select(0, rows),
        torch.where(own, pages.index_select(0, rows), 0),
    )


@kernel_with_varying("placed_stride", "width")
def _gather_kernel(  # type: ignore[no-untyped-def]
    placed_ptr,  # [R, 2]
    last_ptr,  # [rows]
    len_ptr,  # [rows]
    delta_ptr,  # [rows]
    pages_ptr,  # [rows, width]
    out_last_ptr,  # [R]
    out_len_ptr,  # [R]
    out_delta_ptr,  # [R]
    out_pages_ptr,  # [R, width]
    placed_stride,
    width,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(placed_ptr + request * placed_stride)
    held = tl.load(placed_ptr + request * placed_stride + 1)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + row * width + entry, mask=(entry < width) & (entry < held), other=0)
    tl.store(out_pages_ptr + request * width + entry, page, mask=entry < width)
    if tl.program_id(1) == 0:
        tl.store(out_last_ptr + request, tl.load(last_ptr + row))
        tl.store(out_len_ptr + request, tl.load(len_ptr + row).to(tl.int64))
        tl.store(out_delta_ptr + request, tl.load(delta_ptr + row))


def gather_rows_triton(
    placed: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, width = placed.shape[0], pages.shape[1]
    assert placed.shape == (count, 2), f"rows and pages of {count} requests, not {tuple(placed.shape)}"
    assert placed.stride(1) == 1, "a request's row and pages must be adjacent"
    assert pages.is_contiguous(), "the page table must be contiguous"
    assert last_token.is_contiguous(), "columns must be contiguous"
    assert seq_len.is_contiguous(), "columns must be contiguous"
    assert rope_delta.is_contiguous(), "columns must be contiguous"
    last, length, delta = (placed.new_empty(count) for _ in range(3))
    table = pages.new_empty((count, width))
    if count:
        block = min(BLOCK, max(next_power_of_2(width), 16))
        _gather_kernel[(count, max(cdiv(width, block), 1))](
            placed,
            last_token,
            seq_len,
            rope_delta,
            pages,
            last,
            length,
            delta,
            table,
            placed.stride(0),
            width,
            BLOCK=block,
            num_warps=4,
            **chained(placed.device),
        )
    return last, length, delta, table


def _gather_fake(
    placed: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = placed.shape[0]
    last, length, delta = (placed.new_empty(count) for _ in range(3))
    return last, length, delta, pages.new_empty((count, pages.shape[1]))


gather_rows = register_op(
    "gather_rows", gather_rows_reference, mutates=(), fake=_gather_fake, cuda=gather_rows_triton
)


def window_places_reference(
    seq_len: Tensor, rope_delta: Tensor, page_table: Tensor, depth: Tensor, first: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions and slots of N new tokens per request, whose sequence indices begin at seq_len + first.

    Args:
        seq_len: [R] int64.
        rope_delta: [R] int64, rotary position minus sequence index.
        page_table: [R, W] int32; W * page_size exceeds the last of these indices.
        depth: [R, N] int64, distance of each token's position from seq_len.

    Returns (rotary positions [R, N] int64, KV slots [R, N] int64, lengths including them [R] int32).
    """
    nodes = depth.shape[1]
    places = seq_len[:, None] + torch.arange(first, first + nodes, device=seq_len.device)
    page = page_table.gather(1, places // page_size).to(torch.int64)
    slots = page * page_size + places % page_size
    return (seq_len + rope_delta)[:, None] + depth, slots, (seq_len + (first + nodes)).to(torch.int32)


@kernel_with_varying("width", "nodes", "first", "depth_stride", "node_stride")
def _places_kernel(  # type: ignore[no-untyped-def]
    len_ptr,  # [R]
    delta_ptr,  # [R]
    table_ptr,  # [R, width]
    depth_ptr,  # [R, nodes]
    position_ptr,  # [R, nodes]
    slot_ptr,  # [R, nodes]
    out_len_ptr,  # [R]
    width,
    nodes,
    first,
    depth_stride,
    node_stride,  # 0 if all requests' nodes share one depth
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # at least `nodes`
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(len_ptr + request)
    node = tl.arange(0, BLOCK)
    live = node < nodes
    place = length + first + node
    page = tl.load(table_ptr + request * width + place // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    depth = tl.load(depth_ptr + request * depth_stride + node * node_stride, mask=live, other=0)
    tl.store(slot_ptr + request * nodes + node, page * PAGE_SIZE + place % PAGE_SIZE, mask=live)
    position = length + tl.load(delta_ptr + request) + depth
    tl.store(position_ptr + request * nodes + node, position, mask=live)
    tl.store(out_len_ptr + request, (length + first + nodes).to(tl.int32))


def window_places_triton(
    seq_len: Tensor, rope_delta: Tensor, page_table: Tensor, depth: Tensor, first: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    count, nodes = depth.shape
    assert seq_len.shape == (count,), f"{tuple(seq_len.shape)} lengths for {count} requests"
    assert seq_len.is_contiguous(), "lengths must be contiguous"
    assert rope_delta.shape == (count,), f"{tuple(rope_delta.shape)} deltas for {count} requests"
    assert rope_delta.is_contiguous(), "deltas must be contiguous"
    assert page_table.is_contiguous(), "the page table must be contiguous"
    positions, slots = seq_len.new_empty((count, nodes)), seq_len.new_empty((count, nodes))
    lengths = page_table.new_empty(count)
    if count:
        _places_kernel[(count,)](
            seq_len,
            rope_delta,
            page_table,
            depth,
            positions,
            slots,
            lengths,
            page_table.shape[1],
            nodes,
            first,
            *depth.stride(),
            PAGE_SIZE=page_size,
            BLOCK=next_power_of_2(nodes),
            num_warps=1,
            **chained(seq_len.device),
        )
    return positions, slots, lengths


def _places_fake(
    seq_len: Tensor, rope_delta: Tensor, page_table: Tensor, depth: Tensor, first: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    positions = seq_len.new_empty(tuple(depth.shape))
    return positions, torch.empty_like(positions), page_table.new_empty(depth.shape[0])


window_places = register_op(
    "window_places", window_places_reference, mutates=(), fake=_places_fake, cuda=window_places_triton
)
