"""Divides a batch of prompts into the pieces that the programs of `hopper_attention` compute, by the requests' lengths.

A piece consists of a tile of queries, a KV head and a part of the keys. If all tiles had equally many parts, a forward
would take as long as a tile of its longest request: a few new tokens after a long history would hold up the others.
So a tile has about as many parts as its keys are longer than what each program would compute of an equal division.
Only the device knows the lengths, and each program finds its pieces by itself.
"""

from __future__ import annotations

from common.engine.ops.triton_kernel import gl, gluon_kernel, tl

MIN_PART = 4  # blocks of keys
MAX_PARTS = 16  # of a tile, which the last one adds up
# If parts as long as the share of each program would leave programs idle, there are so many times as many.
FINER = 2


def most_parts(tiles: int, requests: int, kv_heads: int, programs: int) -> int:
    """Return an upper bound of the parts of all tiles that have several.

    Args:
        tiles: of one request with all tokens; each request may have one more that is not full.
        programs: as for `divide_batch`, which counts at least half of the blocks that tiles have: hence 2.
    """
    return min((tiles + requests) * kv_heads * MAX_PARTS, 2 * FINER * programs)


@gluon_kernel()
def _add(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon_kernel()
def _parts_of(  # type: ignore[no-untyped-def]
    blocks, work, room, MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr
):
    """Return the parts of a tile with so many blocks of keys."""
    return gl.maximum(gl.minimum(blocks * room // work, gl.minimum(blocks // MIN_PART, MAX_PARTS)), 1)


@gluon_kernel()
def divide_batch(  # type: ignore[no-untyped-def]
    start_ptr, lens_ptr, num_requests, num_tokens, programs,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr, FINER: tl.constexpr,
):  # fmt: skip
    """Return what `find_piece` needs, and the number of pieces.

    `programs` run at the same time. The tokens that follow the last request are padding, like a request without keys.
    """
    # Each warp holds all requests, so that sums need no shared memory.
    index = gl.arange(0, BLOCK_B, gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0]))
    starts = gl.load(start_ptr + index, mask=index <= num_requests, other=0)
    stops = gl.load(start_ptr + index + 1, mask=index < num_requests, other=0)
    stops = gl.where(index == num_requests, num_tokens, stops)
    lengths = gl.load(lens_ptr + index, mask=index < num_requests, other=0)
    tiles = gl.cdiv(stops - starts, TOKENS)
    blocks = gl.cdiv(lengths, BLOCK_N)
    # The first of a request's tiles sees fewer keys than the last one.
    average = (2 * lengths - (stops - starts)) // (2 * BLOCK_N) + 1
    work = gl.maximum(gl.sum(gl.where(lengths > 0, tiles * average, 0), axis=0) * KV_HEADS, 1)
    parts = _parts_of(blocks, work, programs, MIN_PART, MAX_PARTS)
    longest = gl.max(gl.where(tiles > 0, gl.cdiv(blocks, parts), 0), axis=0)
    room = programs
    if (gl.sum(tiles * parts, axis=0) * KV_HEADS > programs) | (4 * longest * programs > 5 * work):
        room = programs * FINER
    parts = _parts_of(blocks, work, room, MIN_PART, MAX_PARTS)
    pieces = tiles * parts * KV_HEADS
    return (index, gl.associative_scan(pieces, 0, _add), pieces, parts, work, room), gl.sum(pieces, axis=0)


@gluon_kernel()
def find_piece(  # type: ignore[no-untyped-def]
    batch, piece, start_ptr, lens_ptr, num_requests, num_tokens,
    TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_PART: tl.constexpr, MAX_PARTS: tl.constexpr,
):  # fmt: skip
    """Return the request of a piece, the tile's first token, the end of the request's tokens, the request's length,
    the KV head, the number of the part, how many parts the tile has, and the place of the first one in `most_parts`.
    """
    index, upto, pieces, parts, work, room = batch
    request = gl.sum((upto <= piece).to(gl.int32), axis=0)
    piece -= gl.sum(gl.where(index < request, pieces, 0), axis=0)
    place = gl.sum(gl.where((index < request) & (parts > 1), pieces, 0), axis=0)
    start = gl.load(start_ptr + request)
    stop, length = num_tokens, num_tokens * 0
    if request < num_requests:
        stop = gl.load(start_ptr + request + 1)
        length = gl.load(lens_ptr + request)
    count = _parts_of(gl.cdiv(length, BLOCK_N), work, room, MIN_PART, MAX_PARTS)
    split, kv_head, tile = piece % count, piece // count % KV_HEADS, piece // (count * KV_HEADS)
    return request, start + tile * TOKENS, stop, length, kv_head, split, count, place + piece - split
