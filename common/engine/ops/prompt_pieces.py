"""Divides prompts into the pieces that the programs of attention compute, by the lengths of all prompts of a forward.

A piece consists of a tile of queries, a KV head and a part of the keys. If all tiles had equally many parts, a forward
would take as long as a tile of its longest request: a few new tokens after a long history would hold up the others.
So a tile has about as many parts as its keys are longer than what each program would compute of an equal division.
Only the device knows the lengths, and each program finds its pieces by itself. Kernels in Triton and in Gluon call
these functions.
"""

from __future__ import annotations

from common.engine.ops.triton_kernel import kernel, tl

MIN_PART = 512  # keys
MAX_PARTS = 16  # of a tile, which the last one adds up
# If parts as long as the share of each program would leave programs idle, there are so many times as many.
FINER = 2


def most_parts(programs: int) -> int:
    """Return an upper bound of the parts of all tiles that have several; `programs` is as for `divide_prompts`."""
    return FINER * programs


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

    Returns the request, its first token, the end of its tokens, its length, the tile's first token, the KV head, the
    number of the part, how many parts the tile has, and if it has several, the place of the first one in `most_parts`.
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
