"""Computes tiles of extend attention over pages, each tile over all keys or over a part of them."""

from __future__ import annotations

from common.engine.ops.kv_rounding import for_fp8_keys
from common.engine.ops.prompt_pieces import divide_prompts, find_piece
from common.engine.ops.triton_kernel import await_previous, kernel, kernel_with_varying, tl


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
    # If this loop began at a variable, Triton would not load ahead in it.
    for step in range(0, end - begin, BLOCK_N):
        position = begin + step + tl.arange(0, BLOCK_N)
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


@kernel
def _add_parts(  # type: ignore[no-untyped-def]
    out_line,  # [ROWS], places of rows of the result
    part_line,  # [ROWS], places of rows of the first part
    lse_line,
    live,
    used,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the sum of the parts of a tile. Other multiprocessors wrote them, so no cache of this one is read."""
    for first in tl.static_range(0, D, COLUMNS):
        dim = first + tl.arange(0, COLUMNS)
        mask = live[:, None] & (dim < D)[None, :]
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        for each in range(used):
            lse = tl.load(lse_line + each * ROWS, mask=live, other=float("-inf"), cache_modifier=".cg")
            place = (part_line + each * (ROWS * D))[:, None] + dim[None, :]
            value = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
            new_most = tl.maximum(most, lse)
            shift = tl.where(new_most == float("-inf"), 0.0, new_most)
            weight, shrink = tl.exp2(lse - shift), tl.exp2(most - shift)
            total = total * shrink + weight
            out = out * shrink[:, None] + value * weight[:, None]
            most = new_most
        out = out / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out_line[:, None] + dim[None, :], out.to(out_line.dtype.element_ty), mask=mask)


@kernel_with_varying("num_requests", "num_tokens", "table_stride", "window", "programs")
def extend_kernel(  # type: ignore[no-untyped-def]
    query_ptr,  # [T, HEADS, D]
    key_ptr,  # [num_pages, PAGE_SIZE, KV_HEADS, D]
    value_ptr,
    table_ptr,  # [B, max_pages]
    start_ptr,  # [B + 1]
    lens_ptr,  # [B]
    out_ptr,  # [T, HEADS, D]
    part_ptr,  # [most_parts, TOKENS * GROUP, D] float32
    lse_ptr,  # [most_parts, TOKENS * GROUP] float32
    ended_ptr,  # int32, zero before and after: programs that have ended, by the place of a tile's first part
    num_requests,
    num_tokens,  # T, padding included
    query_stride,
    table_stride,
    window,
    programs,  # that run at the same time
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
    BLOCK_B: tl.constexpr,  # more than num_requests
    MIN_PART: tl.constexpr,  # keys, a multiple of BLOCK_N
    MAX_PARTS: tl.constexpr,
    FINER: tl.constexpr,
    KEEPS: tl.constexpr,  # leave the rows of requests of length 0, and padding, as they are
    CHAINED: tl.constexpr,
):
    """Each program up to the number of pieces computes one, see `prompt_pieces`: TOKENS new tokens of one request for
    one KV head with all its query heads, over a part of the keys.

    The program of a tile that ends last adds up the parts. The rows of the padding become zero, unless KEEPS.
    """
    await_previous(CHAINED)
    index = tl.arange(0, BLOCK_B)
    if KEEPS:  # noqa: SIM102
        if tl.max(tl.load(lens_ptr + index, mask=index < num_requests, other=0), axis=0) == 0:
            return
    LIVE_GROUP: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = TOKENS * GROUP
    COLUMNS: tl.constexpr = min(BLOCK_D, 32)  # that are added up at a time
    prompts, count = divide_prompts(
        index, start_ptr, lens_ptr, num_requests, num_tokens, programs, window,
        WINDOW, TOKENS, KV_HEADS, BLOCK_N, MIN_PART // BLOCK_N, MAX_PARTS, FINER,
    )  # fmt: skip
    piece = count - 1 - tl.program_id(0)  # of each request first the end, which sees most keys
    if piece < 0:
        return
    request, start, stop, length, first, kv_head, split, parts, place = find_piece(
        prompts, piece, start_ptr, lens_ptr, num_requests, num_tokens, window,
        WINDOW, TOKENS, KV_HEADS, BLOCK_N, MIN_PART // BLOCK_N, MAX_PARTS,
    )  # fmt: skip

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    group = row % GROUP
    token = first + row // GROUP
    live = (token < stop) & (group < LIVE_GROUP)
    mask = live[:, None] & (dim < D)[None, :]
    head = (kv_head * LIVE_GROUP + group)[:, None] * D + dim[None, :]
    used = parts * 0 + 1  # parts that have keys: the first ones
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
        part_keys = tl.maximum(tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_N) * BLOCK_N, MIN_PART)
        used = tl.cdiv(end - begin, part_keys)
        begin += split * part_keys
        end = tl.minimum(begin + part_keys, end)
        clear = tl.minimum(tl.maximum(begin, clear), end)
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
    stores = (split == 0) & (used <= 1)
    if KEEPS:
        stores = stores & (length > 0)
    tl.store(out_ptr + out_place, out.to(out_ptr.dtype.element_ty), mask=mask & stores)
    if (used > 1) & (split < used):
        part_line = part_ptr + (place * ROWS + row) * D
        lse_line = lse_ptr + place * ROWS + row
        tl.store(lse_line + split * ROWS, most + tl.log2(total), mask=live)
        tl.store((part_line + split * (ROWS * D))[:, None] + dim[None, :], out, mask=mask)
        tl.debug_barrier()  # all threads have stored before one of them counts this program
        if tl.atomic_add(ended_ptr + place, 1, sem="acq_rel") == used - 1:
            tl.store(ended_ptr + place, 0)
            out_line = out_ptr + (token.to(tl.int64) * HEADS + kv_head * LIVE_GROUP + group) * D
            _add_parts(out_line, part_line, lse_line, live, used, ROWS, D, COLUMNS)
