"""Extend attention: any number of new tokens per request over pages that already hold their keys and values.

Reads only slots below a request's length: the contents of other pages, of the tail of the last page and of unused
page table entries never affect a result, not even as 0 * NaN. On Hopper GPUs `hopper_attention` serves where it can.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.hopper_attention import hopper_extend, hopper_serves
from common.engine.ops.kv_rounding import for_fp8_keys
from common.engine.ops.paged_attention import check_layout
from common.engine.ops.paged_gather import attend, first_visible, gather
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import cut_attention, room_of
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    multiprocessors,
    next_power_of_2,
    tl,
)

# Rows of a tile (query tokens times query heads of a KV head), keys per step, warps, and the tiles per processor from
# which the shape pays off; measured on an H200.
SHAPES = ((128, 128, 8, 6.0), (128, 64, 4, 2.0), (64, 64, 4, 0.75), (16, 64, 4, 0.0))
MEASURED_HEAD_BYTES = 256  # one head of one token: bf16, D 128
WIDE_SHAPE = (64, 32, 4)
LOG2_E = 1.4426950408889634


def extend_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Compute causal attention of each request's new tokens, its last positions, over all of its seq_lens[b].

    Args:
        query: [T, heads, D], requests one after another; rows past the last request are padding.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], already holding the new tokens.
        page_table: [B, max_pages] int32.
        query_start: [B + 1] int32, prefix sums of new tokens.
        seq_lens: [B] int32, including new tokens. 0: the request's rows are computed elsewhere and zero here.
        window: number of keys that a query sees, including its own; None: all before it.
        scale: of scores.
        key_scale, value_scale: what stored keys and values are multiplied by.

    Returns [T, heads, D]; padding rows are zero.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last or length == 0:
            continue
        offset = length - (last - first)
        begin = first_visible(offset, window)
        key = gather(key_plane, page_table[row], begin, length, query.dtype, key_scale)
        value = gather(value_plane, page_table[row], begin, length, query.dtype, value_scale)
        out[first:last] = attend(query[first:last], key, value, offset - begin, window, scale)
    return out


@kernel
def _visible(position, query_position, window, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [rows, keys]: which keys a query sees. A tree mask over the new tokens would be applied here."""
    distance = query_position[:, None] - position[None, :]
    if WINDOW:
        return (distance >= 0) & (distance < window)
    else:
        return distance >= 0


@kernel
def _over_keys(  # type: ignore[no-untyped-def]
    state,  # running maximum [rows], sum [rows], output [rows, BLOCK_D]
    query,
    query_position,
    key_ptr,
    value_ptr,
    table_ptr,  # the request's page table
    kv_head,
    begin,
    end,
    length,
    window,
    scale_log2,
    MASKED: tl.constexpr,  # False: every query sees every key of begin .. end, whose distance is a multiple of BLOCK_N
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Online softmax (FlashAttention-2, arXiv 2307.08691) over the keys at positions begin .. end - 1."""
    most, total, out = state
    dim = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < length
        if MASKED:
            page = tl.load(table_ptr + position // PAGE_SIZE, mask=live, other=0)
        else:
            page = tl.load(table_ptr + position // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        place = (slot * (KV_HEADS * D) + kv_head * D)[:, None] + dim[None, :]
        if MASKED or BLOCK_D != D:
            read = live[:, None] & (dim < D)[None, :]
            key = tl.load(key_ptr + place, mask=read, other=0.0)
            value = tl.load(value_ptr + place, mask=read, other=0.0)
        else:
            key = tl.load(key_ptr + place)
            value = tl.load(value_ptr + place)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
        if MASKED:
            seen = _visible(position, query_position, window, WINDOW) & live[None, :]
            score = tl.where(seen, score, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, axis=1))
        if MASKED:
            # A row may not have seen any key yet.
            shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        else:
            shift = new_most
        prob = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(prob, axis=1)
        out = out * shrink[:, None]
        out = tl.dot(prob.to(query.dtype), value.to(query.dtype), out, input_precision="ieee")
        most = new_most
    return most, total, out


@kernel_with_varying("num_requests", "num_tokens", "table_stride", "window")
def _extend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, HEADS, D]
    key_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, D]
    value_ptr,
    table_ptr,  # [B, max_pages]
    start_ptr,  # [B + 1]
    lens_ptr,  # [B]
    out_ptr,  # [T, HEADS, D]
    num_requests,
    num_tokens,  # T, padding included
    query_stride,
    table_stride,
    window,
    scale_log2,  # scale * log2(e), times the scale of keys
    value_scale,
    EIGHT_BITS: tl.constexpr,  # pages hold e4m3
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head, padded to a power of two
    BLOCK_D: tl.constexpr,
    TOKENS: tl.constexpr,  # query tokens of a tile
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,  # at least num_requests
    CHAINED: tl.constexpr,
):
    """Each program computes TOKENS new tokens of one request for one KV head with all its query heads.

    Programs find their request in the prefix sums; the remaining ones zero the padding rows.
    """
    await_previous(CHAINED)
    LIVE_GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = TOKENS * GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # first the ends of long requests, which cost most
    index = tl.arange(0, BLOCK_B)
    starts = tl.load(start_ptr + index, mask=index < num_requests, other=0)
    stops = tl.load(start_ptr + index + 1, mask=index < num_requests, other=0)
    tiles = tl.cdiv(stops - starts, TOKENS)
    upto = tl.cumsum(tiles, axis=0)  # tiles of requests 0 .. index
    request = tl.sum((upto <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(index < request, tiles, 0), axis=0)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    group = row % GROUP
    if request < num_requests:
        start = tl.load(start_ptr + request)
        stop = tl.load(start_ptr + request + 1)
        length = tl.load(lens_ptr + request)
    else:  # padding after the last request
        start = tl.load(start_ptr + num_requests)
        stop = num_tokens
        length = start * 0
    first = start + (tile - before) * TOKENS  # row of the first query token
    token = first + row // GROUP
    mask = ((token < stop) & (group < LIVE_GROUP))[:, None] & (dim < D)[None, :]
    head = (kv_head * LIVE_GROUP + group)[:, None] * D + dim[None, :]
    out_place = token.to(tl.int64)[:, None] * (HEADS * D) + head
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_D), tl.float32)
    if (length > 0) & (first < stop):
        query = tl.load(query_ptr + token.to(tl.int64)[:, None] * query_stride + head, mask=mask, other=0.0)
        if EIGHT_BITS:
            query = for_fp8_keys(query)
        offset = length - (stop - start)  # position of the request's first new token
        lowest = offset + first - start  # position of this tile's first query
        query_position = offset + token - start
        end = tl.minimum(lowest + TOKENS, length)
        table = table_ptr + request.to(tl.int64) * table_stride
        begin = 0
        if WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
            clear = begin
        else:
            clear = (lowest + 1) // BLOCK_N * BLOCK_N  # below it every query of the tile sees every key
        state = most, total, out
        if not WINDOW:
            state = _over_keys(
                state, query, query_position, key_ptr, value_ptr, table, kv_head, begin, clear, length, window,
                scale_log2, False, WINDOW, PAGE_SIZE, KV_HEADS, D, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        state = _over_keys(
            state, query, query_position, key_ptr, value_ptr, table, kv_head, clear, end, length, window,
            scale_log2, True, WINDOW, PAGE_SIZE, KV_HEADS, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        most, total, out = state
    out = out / tl.where(total > 0.0, total, 1.0)[:, None]
    if EIGHT_BITS:
        out *= value_scale
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=mask)


def choose_shape(all_rows: int, head_bytes: int, processors: int) -> tuple[int, int, int]:
    """Return (rows, keys, warps) of the largest tile that fills the GPU and fits shared memory."""
    if head_bytes > MEASURED_HEAD_BYTES:
        return WIDE_SHAPE
    fitting = (shape for shape in SHAPES if all_rows >= shape[0] * shape[3] * processors)
    return next(fitting)[:3]


def shape_steps(max_tokens: int, heads: int, kv_heads: int, head_bytes: int, processors: int) -> list[int]:
    """Return token counts up to `max_tokens`, one per tile shape that `choose_shape` can return: each is a kernel."""
    rows_per_token = next_power_of_2(heads // kv_heads) * kv_heads
    first = {1, *(cdiv(int(shape[0] * shape[3] * processors), rows_per_token) for shape in SHAPES)}
    chosen = {
        choose_shape(tokens * rows_per_token, head_bytes, processors): tokens
        for tokens in sorted(first, reverse=True)
        if 1 <= tokens <= max_tokens
    }
    return sorted(chosen.values())


def extend_triton(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    shape: tuple[int, int, int] | None = None,
    num_stages: int | None = None,
) -> Tensor:
    """Launch without reading lengths: the grid covers every division of T rows among the requests."""
    count, heads, head_dim = query.shape
    _, page_size, kv_heads, _ = key_plane.shape
    batch = seq_lens.shape[0]
    check_layout(query, key_plane, value_plane, page_table, seq_lens)
    assert query_start.shape == (batch + 1,), f"{tuple(query_start.shape)} starts for {batch} requests"
    assert query_start.is_contiguous(), "starts must be contiguous"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if count == 0:
        return out
    group = next_power_of_2(heads // kv_heads)
    head_bytes = head_dim * query.element_size()
    rows, keys, warps = shape or choose_shape(
        count * group * kv_heads, head_bytes, multiprocessors(query.device)
    )
    stages = num_stages or (3 if keys == 64 else 2)
    sizes = stages, head_dim, query.element_size()
    rows, keys = cut_attention(max(rows, group), keys, *sizes, room_of(query.device), max(group, 16))
    tokens = rows // group
    grid = (kv_heads, cdiv(count, tokens) + batch + 1)
    _extend_kernel[grid](
        query,
        key_plane,
        value_plane,
        page_table,
        query_start,
        seq_lens,
        out,
        batch,
        count,
        query.stride(0),
        page_table.stride(0),
        window or 0,
        scale * key_scale * LOG2_E,
        value_scale,
        EIGHT_BITS=key_plane.dtype is FP8,
        WINDOW=window is not None,
        PAGE_SIZE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        GROUP=group,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        TOKENS=tokens,
        BLOCK_N=keys,
        BLOCK_B=max(next_power_of_2(batch), 64),
        **chained(query.device),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def extend_cuda(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    given = query, key_plane, value_plane, page_table, query_start, seq_lens
    if hopper_serves(query, key_plane, window, (key_scale, value_scale)):
        return hopper_extend(*given, scale)
    return extend_triton(*given, window, scale, key_scale, value_scale)


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


extend_attention = register_op("extend_attention", extend_reference, mutates=(), fake=_fake, cuda=extend_cuda)
