"""Divides prompts into the pieces that the programs of attention compute, by the lengths of all prompts of a forward.

A piece consists of a tile of queries, a KV head and a part of the keys. If all tiles had equally many parts, a forward
would take as long as a tile of its longest request: a few new tokens after a long history would hold up the others.
So a tile has about as many parts as its keys are longer than what each program would compute of an equal division.
Only the device knows the lengths. Programs find their pieces by themselves, or read them from a plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

MIN_PART = 512  # keys
MAX_PARTS = 16  # of a tile, which the last one adds up
# If parts as long as the share of each program would leave programs idle, there are so many times as many.
FINER = 2
FIELDS = 8  # of a piece in a plan, see `plan_pieces`


def most_parts(programs: int) -> int:
    """Return an upper bound of the parts of all tiles that have several; `programs` is as for `divide_prompts`."""
    return FINER * programs


def most_pieces(tokens: int, requests: int, tile: int, kv_heads: int, programs: int) -> int:
    """Return an upper bound of the pieces of prompts.

    Args:
        tokens: rows of the batch, including padding after the last request.
        tile: tokens of a tile.
        programs: that run at the same time.
    """
    # Each request, and the padding, may have a tile that is not full.
    return kv_heads * min(cdiv(tokens, tile) + requests + 1, tokens) + most_parts(programs)


def check_work(pieces: int, page_table: Tensor, page_size: int, keys: int) -> None:
    """Assert that the work of so many pieces fits 32 bits; `keys` are those of a block."""
    most = page_table.shape[1] * page_size
    assert pieces * (most // keys + 1) < 1 << 31, (
        f"the work of {pieces} pieces over {most} keys does not fit 32 bits"
    )


@kernel
def _parts_of(  # type: ignore[no-untyped-def]
    blocks, work, room, MIN_BLOCKS: tl.constexpr, MAX_PARTS: tl.constexpr
):
    """Return the parts of tiles with so many blocks of keys on average."""
    return tl.maximum(tl.minimum(blocks * room // work, tl.minimum(blocks // MIN_BLOCKS, MAX_PARTS)), 1)


@kernel
def _average_blocks(  # type: ignore[no-untyped-def]
    new, length, window, WINDOW: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the blocks of keys that a tile of a request sees: the first tile sees fewer than the last one."""
    seen = length - new // 2
    if WINDOW:
        seen = tl.minimum(seen, window + TOKENS)
    return seen // BLOCK_N + 1


@kernel
def divide_prompts(  # type: ignore[no-untyped-def]
    index,  # [more than num_requests]: 0, 1, 2, ...
    start_ptr,  # [num_requests + 1]
    lens_ptr,  # [num_requests]
    num_requests,
    num_tokens,
    programs,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FINER: tl.constexpr,
):
    """Return what `find_piece` needs, and the number of pieces.

    `programs` run at the same time. The tokens that follow the last request are padding, like a request without keys.
    """
    starts = tl.load(start_ptr + index, mask=index <= num_requests, other=0)
    stops = tl.load(start_ptr + index + 1, mask=index < num_requests, other=0)
    new = tl.where(index == num_requests, num_tokens, stops) - starts
    lengths = tl.load(lens_ptr + index, mask=index < num_requests, other=0)
    tiles = tl.cdiv(new, TOKENS)
    blocks = tl.where(
        (lengths > 0) & (tiles > 0), _average_blocks(new, lengths, window, WINDOW, TOKENS, BLOCK_N), 0
    )
    work = tl.maximum(tl.sum(tiles * blocks, axis=0) * KV_HEADS, 1)
    longest = tl.max(blocks, axis=0)
    parts, pieces = tiles * 0 + 1, tiles * KV_HEADS
    upto, count, room = tl.cumsum(pieces, axis=0), tl.sum(pieces, axis=0), programs * 0
    # Most forwards end here: their programs start sooner than those that divide.
    if (longest >= 2 * MIN_BLOCKS) & (longest * programs > work):
        parts = _parts_of(blocks, work, programs, MIN_BLOCKS, MAX_PARTS)
        share = tl.max(tl.cdiv(blocks, parts), axis=0)
        room = programs
        if (tl.sum(tiles * parts, axis=0) * KV_HEADS > programs) | (4 * share * programs > 5 * work):
            room = programs * FINER
        parts = _parts_of(blocks, work, room, MIN_BLOCKS, MAX_PARTS)
        pieces = tiles * parts * KV_HEADS
        upto, count = tl.cumsum(pieces, axis=0), tl.sum(pieces, axis=0)
    return (upto, pieces, parts, work, room), count


@kernel
def find_piece(  # type: ignore[no-untyped-def]
    prompts,  # as returned by `divide_prompts`
    piece,
    start_ptr,
    lens_ptr,
    num_requests,
    num_tokens,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Find a piece.

    Return the request, its first token, the end of its tokens, its length, the tile's first token, the KV head, the
    number of the part, how many parts the tile has, and if it has several, the place of the first one among all parts.
    """
    upto, pieces, parts, work, room = prompts
    earlier = upto <= piece  # of requests before
    request = tl.sum(earlier.to(tl.int32), axis=0)
    piece -= tl.max(tl.where(earlier, upto, 0), axis=0)
    start = tl.load(start_ptr + request)
    stop, length = num_tokens, num_tokens * 0
    if request < num_requests:
        stop = tl.load(start_ptr + request + 1)
        length = tl.load(lens_ptr + request)
    count, place = num_tokens * 0 + 1, num_tokens * 0
    if (room > 0) & (length > 0):
        blocks = _average_blocks(stop - start, length, window, WINDOW, TOKENS, BLOCK_N)
        count = _parts_of(blocks, work, room, MIN_BLOCKS, MAX_PARTS)
        place = tl.sum(tl.where(earlier & (parts > 1), pieces, 0), axis=0)
    split, kv_head, tile = piece % count, piece // count % KV_HEADS, piece // (count * KV_HEADS)
    return request, start, stop, length, start + tile * TOKENS, kv_head, split, count, place + piece - split


@kernel_with_varying("num_requests", "num_tokens", "programs")
def _plan_pieces_kernel(  # type: ignore[no-untyped-def]
    start_ptr,  # [B + 1]
    lens_ptr,  # [B]
    plan_ptr,  # [pieces, FIELDS]
    num_requests,
    num_tokens,
    programs,
    TOKENS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,  # more than num_requests
    MIN_PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FINER: tl.constexpr,
    FIELDS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program p writes piece p."""
    await_previous(CHAINED)
    prompts, count = divide_prompts(
        tl.arange(0, BLOCK_B), start_ptr, lens_ptr, num_requests, num_tokens, programs, 0,
        False, TOKENS, KV_HEADS, BLOCK_N, MIN_PART // BLOCK_N, MAX_PARTS, FINER,
    )  # fmt: skip
    entry = plan_ptr + tl.program_id(0) * FIELDS
    piece = count - 1 - tl.program_id(0)  # of each request first the end, which sees most keys
    if piece < 0:
        tl.store(entry, 0)
    else:
        request, _start, stop, length, first, kv_head, split, parts, place = find_piece(
            prompts, piece, start_ptr, lens_ptr, num_requests, num_tokens, 0,
            False, TOKENS, KV_HEADS, BLOCK_N, MIN_PART // BLOCK_N, MAX_PARTS,
        )  # fmt: skip
        tl.store(entry, parts)
        tl.store(entry + 1, request)
        tl.store(entry + 2, stop)
        tl.store(entry + 3, length)
        tl.store(entry + 4, first)
        tl.store(entry + 5, kv_head)
        tl.store(entry + 6, split)
        tl.store(entry + 7, place)


def plan_pieces(
    query_start: Tensor, seq_lens: Tensor, tokens: int, tile: int, kv_heads: int, keys: int, programs: int
) -> Tensor:
    """Return the pieces of prompts in the order in which programs compute them.

    Args:
        query_start: [B + 1] int32, prefix sums of new tokens.
        seq_lens: [B] int32, including new tokens. 0: the request has no keys.
        tokens: rows of the batch, including padding after the last request.
        tile: tokens of a tile.
        keys: of a block.
        programs: that run at the same time.

    Returns [pieces, FIELDS] int32: how many parts the tile has (0: there is no such piece), the request, the end of
    its tokens, its length, the tile's first token, the KV head, the number of the part, and if there are several, the
    place of the first one among all parts.
    """
    batch = len(seq_lens)
    pieces = most_pieces(tokens, batch, tile, kv_heads, programs)
    plan = torch.empty((pieces, FIELDS), dtype=torch.int32, device=seq_lens.device)
    _plan_pieces_kernel[(pieces,)](
        query_start,
        seq_lens,
        plan,
        batch,
        tokens,
        programs,
        TOKENS=tile,
        KV_HEADS=kv_heads,
        BLOCK_N=keys,
        BLOCK_B=max(next_power_of_2(batch + 1), 128),
        MIN_PART=MIN_PART,
        MAX_PARTS=MAX_PARTS,
        FINER=FINER,
        FIELDS=FIELDS,
        num_warps=1,
        **chained(seq_lens.device),
    )
    return plan
