"""Verify attention: N new tokens per request at the end of W slots that form a tree, after a prefix of any length.

Slot j of the W is at position prefix + j of the pages, but its token has position prefix + its depth. A new token
attends to the whole prefix, itself and its ancestors. Only slots below a request's length are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_codes import FP8
from common.engine.ops.key_parts import Division, KeyParts, keys_of_part, store_part
from common.engine.ops.kv_rounding import as_read, for_fp8_keys, selected, spread, spread_columns
from common.engine.ops.paged_attention import check_layout, load_keys, online_softmax
from common.engine.ops.paged_gather import gather
from common.engine.ops.part_plan import part_at
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import cut_attention, room_of
from common.engine.ops.step_plans import MAX_BITS, MAX_ROWS, has_bits, plan_verify, rows_of, verify_division
from common.engine.ops.triton_kernel import (
    LOG2_E,
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

SPREAD_PROGRAMS = 256  # from which values in eight bits are multiplied in the order of `spread_columns`


def verify_reference(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    """Attend all rows in one launch, without host synchronisation. A padding row (length 0) yields a finite or NaN row.

    Args:
        query: [B * N, heads, D], the new tokens of a request in order, parents before children.
        key_plane, value_plane: [num_pages, page_size, kv_heads, D], already holding the new tokens.
        page_table: [B, max_pages] int32.
        seq_lens: [B] int32, including the W slots.
        tree_mask: [B, N, W] bool over the last W slots of each request, row n true for new token n and its ancestors.
            W == N: the whole tree is new. W > N: its first W - N slots hold tokens of earlier calls.
        max_seq_len: host upper bound of seq_lens.
        window: number of positions that a query sees, including its own; None: all before it.
        scale: of scores.
        key_scale, value_scale: what stored keys and values are multiplied by.
        plan: `plan_verify` of these requests, for all layers with the same window; only kernels need one, and a call
            without one makes its own.

    Returns [B * N, heads, D].
    """
    batch, new, width = tree_mask.shape
    page_size, kv_heads, head_dim = key_plane.shape[1:]
    position = torch.arange(max_seq_len, device=query.device)  # slot order
    entry = (position // page_size).clamp(max=page_table.shape[1] - 1)
    slot = page_table.long()[:, entry] * page_size + position % page_size  # [B, L]
    length = seq_lens.long().clamp(width, max_seq_len)[:, None]
    # Slots past a request's length must not be read, not even as 0 * NaN.
    slot = torch.where(position < length, slot, slot.gather(1, length - 1))
    visible = _visible(position, length - width, tree_mask, window)  # [B, N, L]
    key, value = (  # [B, kv_heads, L, D]
        as_read(selected(plane.view(-1, kv_heads, head_dim), slot.view(-1)), query.dtype, each)
        .view(*slot.shape, kv_heads, head_dim)
        .transpose(1, 2)
        for plane, each in ((key_plane, key_scale), (value_plane, value_scale))
    )
    queries = query.view(batch, new, -1, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        queries,
        key,
        value,
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=queries.shape[1] != kv_heads,
    )
    return out.transpose(1, 2).reshape(query.shape).contiguous()


def _visible(position: Tensor, prefix: Tensor, tree_mask: Tensor, window: int | None) -> Tensor:
    """Return [B, N, L] bool: which slots, in position order [L], a new token sees after prefix [B, 1]."""
    batch, new, width = tree_mask.shape
    seen_in_tree, seen = tree_mask, torch.ones_like(position, dtype=torch.bool)
    if window is not None:
        # For each token and slot: the number of its ancestors, itself included, that follow the slot.
        later = tree_mask.sum(-1, keepdim=True) - tree_mask.cumsum(-1)
        seen_in_tree = tree_mask & (later < window)
        depth = tree_mask.sum(-1) - 1  # [B, N]
        seen = position > (prefix + depth)[:, :, None] - window
    slot = (position - prefix).clamp(0, width - 1)  # [B, L]
    in_tree = seen_in_tree.gather(2, slot[:, None, :].expand(batch, new, -1))
    return torch.where((position >= prefix)[:, None], in_tree & (position < prefix + width)[:, None], seen)


def _verify_cpu(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
) -> Tensor:
    """Compute the same where lengths can be read: a request is neither padded to the longest nor affected by others."""
    _, new, width = tree_mask.shape
    rows, gqa = [], query.shape[1] != key_plane.shape[2]
    for row, length in enumerate(seq_lens.clamp(min=width).tolist()):
        visible = torch.ones(1, new, length, dtype=torch.bool)
        visible[:, :, length - width :] = tree_mask[row]
        if window is not None:
            position, prefix = torch.arange(length), torch.tensor([[length - width]])
            visible = _visible(position, prefix, tree_mask[row : row + 1], window)
        key, value = (
            gather(plane, page_table[row], 0, length, query.dtype, each).transpose(0, 1)[None]
            for plane, each in ((key_plane, key_scale), (value_plane, value_scale))
        )
        queries = query[row * new : (row + 1) * new].transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(
            queries, key, value, attn_mask=visible[:, None], scale=scale, enable_gqa=gqa
        )
        rows.append(attended[0].transpose(0, 1))
    return torch.cat(rows) if rows else torch.empty_like(query)


@kernel
def _ancestor_bits(tree, live_row, width, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [ROWS] int64: bit j says whether a row sees slot j of the tree.

    `tree`: [ROWS] pointers to the rows of the mask.
    """
    slot = tl.arange(0, BLOCK_W)
    read = live_row[:, None] & (slot < width)[None, :]
    marked = tl.load(tree[:, None] + slot[None, :], mask=read, other=0).to(tl.int64)
    return tl.sum(marked << slot.to(tl.int64)[None, :], axis=1)


@kernel
def _depths(tree, live_row, width, ROWS: tl.constexpr, BLOCK_W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [ROWS] int32: the number of ancestors of each row's token."""
    slot = tl.arange(0, BLOCK_W)
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, width, BLOCK_W):
        read = live_row[:, None] & (start + slot < width)[None, :]
        marked = tl.load(tree[:, None] + (start + slot)[None, :], mask=read, other=0).to(tl.int32)
        count += tl.sum(marked, axis=1)
    return count - 1


@kernel_with_varying("new", "width", "table_stride", "mask_stride", "mask_row_stride", "window", "splits")
def _verify_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [B * new, HEADS, D]
    key_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, D]
    value_ptr,
    table_ptr,  # [B, max_pages]
    lens_ptr,  # [B]
    mask_ptr,  # [B, new, width]
    plan_ptr,  # read if PLANNED
    out_ptr,  # [B * new, HEADS, D]
    part_ptr,  # this and the next two: see `store_part`
    lse_ptr,
    ended_ptr,
    new,
    width,
    query_stride,
    table_stride,
    mask_stride,
    mask_row_stride,
    window,
    scale_log2,  # scale * log2(e), times the scale of keys
    value_scale,
    splits,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    EIGHT_BITS: tl.constexpr,  # pages hold e4m3
    SPREAD: tl.constexpr,  # values are multiplied in the order of `spread_columns`
    PLANNED: tl.constexpr,
    FIELDS: tl.constexpr,
    SPLIT: tl.constexpr,  # a request may have more than one part
    COMBINED: tl.constexpr,
    WINDOW: tl.constexpr,
    BITS: tl.constexpr,  # a row's ancestors fit into 64 bits, and there is no window
    ROWS: tl.constexpr,  # rows of a tile: new tokens times query heads of one KV head, padded for the matrix units
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # keys of a step over the prefix
    BLOCK_W: tl.constexpr,  # if BITS, all slots of the tree; else the slots of a step over it
    GRANULE: tl.constexpr,  # this and the next two: see key_parts
    LIVE_ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program computes one part of one request's keys for a tile of rows.

    BITS: the tree's slots are keys like others, and a row's bits say whether it sees them. Otherwise the last part
    goes over them after its part of the prefix, which costs it the time of one more read.
    """
    await_previous(CHAINED)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    place = tl.program_id(1)
    request, split, length, granules = part_at(plan_ptr, lens_ptr, place, splits, PLANNED, FIELDS)
    prefix = tl.maximum(length - width, 0)
    begin, bound = 0, prefix
    if BITS:
        bound = length
    if WINDOW:
        begin = tl.maximum(prefix - window + 1, 0)
    begin, end, used = keys_of_part(begin, bound, split, splits, granules, PLANNED, GRANULE, BLOCK_N)

    row, dim = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, head = request * new + row // GROUP, kv_head * GROUP + row % GROUP
    query_place = token[:, None] * query_stride + head[:, None] * D + dim[None, :]
    read_rows = row < tl.where(length > 0, new * GROUP, 0)  # a padding row's query may be NaN
    query = tl.load(query_ptr + query_place, mask=read_rows[:, None] & (dim < D)[None, :], other=0.0)
    if EIGHT_BITS:
        query = for_fp8_keys(query)
    table = table_ptr + request * table_stride
    tree = mask_ptr + request * mask_stride + (row // GROUP) * mask_row_stride
    live_row = row < new * GROUP
    bits = tl.zeros((ROWS,), tl.int64)
    if BITS:
        bits = _ancestor_bits(tree, live_row, width, BLOCK_W)
    depth = tl.zeros((ROWS,), tl.int32)
    if WINDOW:
        depth = _depths(tree, live_row, width, ROWS, BLOCK_W)

    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < end
        page = tl.load(table + position // PAGE_SIZE, mask=live, other=0)
        key = load_keys(key_ptr, page, position, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
        seen = live[None, :]
        if BITS:
            at = position - prefix
            bit = bits[:, None] >> tl.minimum(tl.maximum(at, 0), 63).to(tl.int64)[None, :]
            seen = seen & ((at < 0)[None, :] | (bit & 1 != 0))
        if WINDOW:
            seen = seen & (position[None, :] > (prefix + depth - window)[:, None])
        score = tl.where(seen, score, float("-inf"))
        value = load_keys(value_ptr, page, position, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
        if SPREAD:
            value = spread_columns(value, BLOCK_N, BLOCK_D)
        most, total, out = online_softmax(most, total, out, score, value.to(query.dtype), False)

    tree_end = 0
    if not BITS:
        tree_end = tl.where(split == used - 1, tl.minimum(width, length), 0)
        slot = tl.arange(0, BLOCK_W)
        above = tl.zeros((ROWS,), tl.int32)  # ancestors in earlier slots, including the row itself
        for start in range(0, tree_end, BLOCK_W):
            at = start + slot
            live = at < tree_end
            seen = tl.load(tree[:, None] + at[None, :], mask=live_row[:, None] & live[None, :], other=0) != 0
            if WINDOW:
                upto = above[:, None] + tl.cumsum(seen.to(tl.int32), axis=1)
                above += tl.sum(seen.to(tl.int32), axis=1)
                seen = seen & (depth[:, None] + 1 - upto < window)
            page = tl.load(table + (prefix + at) // PAGE_SIZE, mask=live, other=0)
            key = load_keys(key_ptr, page, prefix + at, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
            score = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
            score = tl.where(seen, score, float("-inf"))
            value = load_keys(value_ptr, page, prefix + at, live, kv_head, PAGE_SIZE, KV_HEADS, D, BLOCK_D)
            if SPREAD:
                value = spread_columns(value, BLOCK_W, BLOCK_D)
            most, total, out = online_softmax(most, total, out, score, value.to(query.dtype), False)

    result = out / tl.where(total > 0.0, total, 1.0)[:, None]  # zero for a padding row
    if EIGHT_BITS:
        result *= value_scale
    if SPREAD:
        dim = spread(dim, BLOCK_D)
    lse = most + tl.log2(tl.where(total > 0.0, total, 1.0))
    ended = ended_ptr + request * tl.num_programs(0) + tl.program_id(0)
    base = request * new * HEADS + kv_head * GROUP
    line, lines = token * HEADS + head, new * HEADS
    shift = (place - split - request) * lines
    store_part(
        *(result, lse, line, live_row, dim, base, tile * ROWS, new * GROUP, split, used, shift, lines),
        *(out_ptr, part_ptr, lse_ptr, ended),
        *(SPLIT, COMBINED, HEADS, GROUP, D, BLOCK_D, LIVE_ROWS, TOGETHER),
    )


def verify_triton(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    max_seq_len: int,
    window: int | None,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    plan: Tensor | None = None,
    division: Division | None = None,
    num_warps: int = 4,
) -> Tensor:
    """Let all new tokens of a request read its keys together, those of long requests in more parts.

    A padding row (length 0) yields zeros.

    Args:
        division: replaces the one that `plan_verify` chooses.
    """
    batch, new, width = tree_mask.shape
    count, heads, head_dim = query.shape
    _, page_size, kv_heads, _ = key_plane.shape
    assert count == batch * new, f"{count} rows for {batch} requests of {new} new tokens"
    assert width >= new, f"a tree of {width} slots cannot hold {new} new tokens"
    check_layout(query, key_plane, value_plane, page_table, seq_lens)
    assert page_table.shape[0] >= batch, "one page list per request"
    assert len(seq_lens) == batch, f"{len(seq_lens)} lengths for {batch} requests"
    assert tree_mask.stride(2) == 1, "slots of a mask row must be adjacent"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if count == 0:
        return out
    if plan is None:
        plan = plan_verify(query, key_plane, seq_lens, tree_mask, max_seq_len, window, division)
    division = division or verify_division(query, key_plane, new, max_seq_len, window)[0]
    group, eight_bits = heads // kv_heads, key_plane.dtype is FP8
    all_rows, rows = new * group, rows_of(new, group)
    programs = batch * kv_heads * cdiv(all_rows, rows)
    sizes = division.keys, division.stages, head_dim, query.element_size()
    rows, block_keys = cut_attention(rows, *sizes, room_of(query.device))
    tiles, bits = cdiv(all_rows, rows), has_bits(width, window)
    parts = KeyParts(batch * kv_heads * tiles, min(rows, all_rows), division, batch, plan, out)
    _verify_kernel[(kv_heads * tiles, parts.places)](
        *(query, key_plane, value_plane, page_table, seq_lens, tree_mask, seq_lens if plan is None else plan),
        *(out, *parts.arguments, new, width),
        *(query.stride(0), page_table.stride(0), tree_mask.stride(0), tree_mask.stride(1), window or 0),
        *(scale * key_scale * LOG2_E, value_scale, division.splits),
        PAGE_SIZE=page_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        EIGHT_BITS=eight_bits,
        SPREAD=eight_bits and rows < MAX_ROWS and programs >= SPREAD_PROGRAMS,
        WINDOW=window is not None,
        BITS=bits,
        ROWS=rows,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        BLOCK_N=block_keys,
        BLOCK_W=min(max(next_power_of_2(width), 16), MAX_BITS, MAX_BITS if bits else block_keys),
        **parts.constants,
        num_warps=num_warps,
        num_stages=division.stages,
        **chained(query.device),
    )
    parts.combine()
    return out


def _fake(query: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


verify_attention = register_op(
    "verify_attention", verify_reference, mutates=(), fake=_fake, cpu=_verify_cpu, cuda=verify_triton
)
