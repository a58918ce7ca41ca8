"""Decode attention: one new token per request over its pages.

Reads only slots below a request's length: the contents of other pages, of the tail of the last page and of unused
page table entries never affect a result, not even as 0 * NaN. On the CPU a request's numbers depend only on its own
length, not on the rest of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division, KeyParts, keys_of_part, store_part
from common.engine.ops.kv_rounding import as_read, for_fp8_keys, selected, spread, spread_columns
from common.engine.ops.paged_attention import check_layout, load_keys
from common.engine.ops.paged_gather import attend, first_visible, gather
from common.engine.ops.part_plan import part_at
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import cut_attention, room_of
from common.engine.ops.step_plans import decode_division, plan_decode
from common.engine.ops.triton_kernel import (
    LOG2_E,
    await_previous,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

SHORT = 256  # CPU: requests up to this length are gathered in buckets, longer ones one by one
BUCKET = 64


def decode_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    """Compute attention of one new token per request over its seq_lens[b] cached positions, including its own.

    It is vectorised over the batch and never synchronises with the host. A padding row (length 0) yields a finite or
    NaN row.

    Args:
        query: [B, heads, D].
        page_table: [B, max_pages] int32.
        seq_lens: [B] int32, at most max_pages * page_size.
        max_seq_len: upper bound of seq_lens known to the host; the size of the gather.
        scale: of scores.
        key_scale, value_scale: what stored keys and values are multiplied by.
        plan: `plan_decode` of these requests, for all layers with the same window; only kernels need one, and a call
            without one makes its own.

    Returns [B, heads, D].
    """
    batch, _, head_dim = query.shape
    page_size, kv_heads = key_plane.shape[1], key_plane.shape[2]
    bound = max_seq_len  # not limited to the width of the table: a row's sums must not depend on other rows
    position = torch.arange(bound, device=query.device)  # [L]
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    slot = page_table.long()[:, entry] * page_size + position % page_size  # [B, L]
    last = seq_lens.long().clamp(1, bound)[:, None] - 1  # [B, 1]
    visible = position <= last
    if window is not None:
        visible &= position > last - window
    # Invisible positions read the token's own slot.
    slot = torch.where(visible, slot, slot.gather(1, last)).view(-1)
    shape = batch, bound, kv_heads, head_dim
    key, value = (
        as_read(selected(plane.view(-1, kv_heads, head_dim), slot).view(shape), query.dtype, each)
        for plane, each in ((key_plane, key_scale), (value_plane, value_scale))
    )
    grouped = query.reshape(batch, kv_heads, -1, head_dim)  # the heads of a group are rows of one product
    mask = visible[:, None, None, :]
    out = F.scaled_dot_product_attention(
        grouped, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.reshape(query.shape).contiguous()


def _decode_cpu(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    """Compute the same on the CPU, where lengths can be read: no request is padded to the longest one of the batch."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    buckets: dict[int, list[int]] = {}
    for row, length in enumerate(seq_lens.tolist()):
        if length <= SHORT:
            buckets.setdefault(-(-max(length, 1) // BUCKET) * BUCKET, []).append(row)
            continue
        begin = first_visible(length - 1, window)
        key = gather(key_plane, page_table[row], begin, length, query.dtype, key_scale)
        value = gather(value_plane, page_table[row], begin, length, query.dtype, value_scale)
        out[row] = attend(query[row : row + 1], key, value, length - 1 - begin, window, scale)[0]
    for bound, rows in buckets.items():
        index = torch.tensor(rows)
        rest = page_table[index], seq_lens[index], bound, window, scale, key_scale, value_scale
        out[index] = decode_reference(query[index], key_plane, value_plane, *rest)
    return out


@kernel_with_varying("table_stride", "window", "splits")
def _decode_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [B, HEADS, D]
    key_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, D]
    value_ptr,
    table_ptr,  # [B, max_pages]
    lens_ptr,  # [B]
    plan_ptr,  # read if PLANNED
    out_ptr,  # [B, HEADS, D]
    part_ptr,  # this and the next two: see `store_part`
    lse_ptr,
    ended_ptr,
    query_stride,
    table_stride,
    window,
    scale_log2,  # scale * log2(e), times the scale of keys
    value_scale,
    splits,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    EIGHT_BITS: tl.constexpr,  # pages hold e4m3
    PLANNED: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,  # a request may have more than one part
    COMBINED: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,  # query heads of one KV head, padded for the matrix units
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GRANULE: tl.constexpr,  # this and the next two: see key_parts
    LIVE_ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program computes one part of one request's keys, for all query heads of one KV head."""
    await_previous(CHAINED)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head, place = tl.program_id(0), tl.program_id(1)
    request, split, length, granules = part_at(plan_ptr, lens_ptr, place, splits, PLANNED, FIELDS)
    begin = 0
    if WINDOW:
        begin = tl.maximum(length - window, 0)
    begin, end, used = keys_of_part(begin, length, split, splits, granules, PLANNED, GRANULE, BLOCK_N)

    row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (dim < D)[None, :]
    head = kv_head * GROUP + row
    query_place = request * query_stride + head[:, None] * D + dim[None, :]
    query = tl.load(query_ptr + query_place, mask=(row < GROUP)[:, None] & inside, other=0.0)
    if EIGHT_BITS:
        query = for_fp8_keys(query)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < end
        page = tl.load(table_ptr + request * table_stride + position // PAGE_SIZE, mask=live, other=0)
        key = load_keys(key_ptr, page, position, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
        score = tl.where(live[None, :], score, float("-inf"))
        # `online_softmax`, but values are read in the middle of it: read before it, FP8 values take 20 to 40 registers
        # more.
        new_most = tl.maximum(most, tl.max(score, axis=1))  # finite: a block has a live key
        prob = tl.exp2(score - new_most[:, None])
        shrink = tl.exp2(most - new_most)
        total = total * shrink + tl.sum(prob, axis=1)
        value = load_keys(value_ptr, page, position, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        if EIGHT_BITS:
            value = spread_columns(value, BLOCK_N, BLOCK_D)
        out = out * shrink[:, None]
        out += tl.dot(prob.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        most = new_most

    result = out / tl.where(total > 0.0, total, 1.0)[:, None]  # zero for a padding row
    if EIGHT_BITS:
        result *= value_scale
        dim = spread(dim, BLOCK_D)
    lse = most + tl.log2(tl.where(total > 0.0, total, 1.0))
    ended = ended_ptr + request * KV_HEADS + kv_head
    base = request * HEADS + kv_head * GROUP
    shift = (place - split - request) * HEADS
    store_part(
        *(result, lse, base + row, row < GROUP, dim, base, 0, GROUP, split, used, shift, HEADS),
        *(out_ptr, part_ptr, lse_ptr, ended),
        *(SPLIT, COMBINED, HEADS, GROUP, D, BLOCK_D, LIVE_ROWS, TOGETHER),
    )


def decode_triton(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
    division: Division | None = None,
    num_warps: int = 4,
) -> Tensor:
    """Split over keys (flash-decoding), long requests into more parts. A padding row (length 0) yields zeros.

    Args:
        division: replaces the one that `plan_decode` chooses.
    """
    batch, heads, head_dim = query.shape
    _, page_size, kv_heads, _ = key_plane.shape
    check_layout(query, key_plane, value_plane, page_table, seq_lens)
    assert page_table.shape[0] >= batch, "one page list per request"
    assert len(seq_lens) == batch, f"{len(seq_lens)} lengths for {batch} requests"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if batch == 0:
        return out
    if plan is None:
        plan = plan_decode(query, key_plane, seq_lens, max_seq_len, window, division)
    division = division or decode_division(query, key_plane, max_seq_len, window)[0]
    group = heads // kv_heads
    rows = max(next_power_of_2(group), 16)
    _, block_keys = cut_attention(
        rows, division.keys, division.stages, head_dim, query.element_size(), room_of(query.device), rows
    )
    parts = KeyParts(batch * kv_heads, group, division, batch, plan, out)
    block_d = max(next_power_of_2(head_dim), 16)
    _decode_kernel[(kv_heads, parts.places)](
        query,
        key_plane,
        value_plane,
        page_table,
        seq_lens,
        seq_lens if plan is None else plan,
        out,
        *parts.arguments,
        query.stride(0),
        page_table.stride(0),
        window or 0,
        scale * key_scale * LOG2_E,
        value_scale,
        division.splits,
        PAGE_SIZE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        EIGHT_BITS=key_plane.dtype is FP8,
        WINDOW=window is not None,
        ROWS=rows,
        BLOCK_D=block_d,
        BLOCK_N=block_keys,
        **parts.constants,
        num_warps=num_warps,
        num_stages=division.stages,
        **chained(query.device),
    )
    parts.combine()
    return out


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


decode_attention = register_op(
    "decode_attention", decode_reference, mutates=(), fake=_fake, cpu=_decode_cpu, cuda=decode_triton
)
