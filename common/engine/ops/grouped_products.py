"""The products of the experts of many tokens, whose pairs are grouped by expert: see `expert_products`.

A tile is some adjacent pairs of one expert (`group_pairs`). The programs of a tile follow each other, so that its rows
and its expert's weights are read from memory once and then from the L2 cache. Grids are as large as any choice of
experts needs; programs without a tile end at once.

The inner values are in the order of the groups, so that the second product reads adjacent rows.
"""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.expert_tiles import ExpertTiles
from common.engine.ops.expert_weights import prepare, weight_tile
from common.engine.ops.group_pairs import FIELDS, PairGroups
from common.engine.ops.triton_kernel import await_previous, cdiv, chained, described, kernel, tl


@kernel
def _rows_of(  # type: ignore[no-untyped-def]
    x_ptr, pairs_ptr, place, real, DEPTH: tl.constexpr, CHOSEN: tl.constexpr, GATED: tl.constexpr
):
    """Return the pairs at some places, and pointers to the rows that their products read."""
    pair = tl.load(pairs_ptr + place, mask=real, other=0)
    source = place
    if GATED:
        source = pair // CHOSEN
    return pair, x_ptr + source.to(tl.int64)[:, None] * DEPTH


@kernel
def _load_rows(rows, column, real, DEPTH: tl.constexpr, CUT: tl.constexpr):  # type: ignore[no-untyped-def]
    read = real[:, None]
    if CUT:
        read = read & (column < DEPTH)[None, :]
    return tl.trans(tl.load(rows + column[None, :], mask=read, other=0.0))


@kernel
def _store(  # type: ignore[no-untyped-def]
    out, up, shares_ptr, out_ptr, pair, place, real, column, size, GATED: tl.constexpr
):
    """Finish output columns of some pairs and store them: inner values by place, the experts' outputs by pair."""
    dtype = out_ptr.dtype.element_ty
    if GATED:
        # Rounded where two separate kernels would round.
        gate = out.to(dtype).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
        line = place
    else:
        share = tl.load(shares_ptr + pair, mask=real, other=0.0)
        out = out.to(dtype).to(tl.float32) * share[None, :]
        line = pair
    target = out_ptr + line.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(target, out.to(dtype), mask=real[None, :] & (column < size)[:, None])


@kernel
def _multiply_tile(  # type: ignore[no-untyped-def]
    x_ptr,  # [tokens, DEPTH], or if not GATED [pairs, DEPTH] by place
    rows,  # a descriptor of x_ptr with tiles of ROWS rows if DESCRIBED
    weight,  # [experts * size, DEPTH], or if GATED [experts * 2 * size, DEPTH]
    pairs_ptr,  # [pairs]
    shares_ptr,  # [pairs] float32; read if not GATED
    out_ptr,  # [pairs, size]
    expert,
    begin,  # first place
    count,  # pairs, at most ROWS + EXTRA
    first,  # output column
    size,
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    EXTRA: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute COLUMNS output columns of a tile: a product for its first ROWS pairs, and one for the others if EXTRA."""
    place = begin + tl.arange(0, ROWS)
    real = place < begin + count
    pair, lines = _rows_of(x_ptr, pairs_ptr, place, real, DEPTH, CHOSEN, GATED)
    out = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    if EXTRA:
        more_place = begin + ROWS + tl.arange(0, EXTRA)
        more_real = more_place < begin + count
        more_pair, more_lines = _rows_of(x_ptr, pairs_ptr, more_place, more_real, DEPTH, CHOSEN, GATED)
        more_out = tl.zeros((COLUMNS, EXTRA), tl.float32)
        more_up = tl.zeros((COLUMNS, EXTRA), tl.float32)
    weights = expert * size
    if GATED:
        weights = expert * 2 * size
    for k in range(0, DEPTH, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        if DESCRIBED:
            # Rows past the tile are of other experts, or unused; their columns of the product are not stored.
            few = tl.trans(rows.load([begin, k]))
        else:
            few = _load_rows(lines, column, real, DEPTH, CUT)
        tile = weight_tile(weight, weights + first, weights + size, k, DEPTH, CUT, BULK, COLUMNS, BLOCK_K)
        out = tl.dot(tile, few, out, input_precision="ieee")
        if EXTRA:
            more = _load_rows(more_lines, column, more_real, DEPTH, CUT)
            more_out = tl.dot(tile, more, more_out, input_precision="ieee")
        if GATED:
            tile = weight_tile(
                weight, weights + size + first, weights + 2 * size, k, DEPTH, CUT, BULK, COLUMNS, BLOCK_K
            )
            up = tl.dot(tile, few, up, input_precision="ieee")
            if EXTRA:
                more_up = tl.dot(tile, more, more_up, input_precision="ieee")
    column = first + tl.arange(0, COLUMNS)
    _store(out, up, shares_ptr, out_ptr, pair, place, real, column, size, GATED)
    if EXTRA:
        _store(more_out, more_up, shares_ptr, out_ptr, more_pair, more_place, more_real, column, size, GATED)


@kernel
def _grouped_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    rows,
    weight,
    pairs_ptr,
    tiles_ptr,  # [tiles, FIELDS]
    shares_ptr,
    out_ptr,
    size,  # output columns
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    SHORT: tl.constexpr,  # rows of the product of a tile with no more pairs; 0: none
    EXTRA: tl.constexpr,
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program computes COLUMNS columns of a tile, by a product of the size that its number of pairs needs."""
    await_previous(CHAINED)
    first, tile = tl.program_id(0) * COLUMNS, tiles_ptr + tl.program_id(1) * FIELDS
    expert, begin, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if SHORT:  # noqa: SIM102 - known to the compiler
        if (count > 0) & (count <= SHORT):
            _multiply_tile(
                x_ptr, rows, weight, pairs_ptr, shares_ptr, out_ptr, expert, begin, count, first, size,
                DEPTH, CHOSEN, GATED, CUT, BULK, False, SHORT, 0, COLUMNS, BLOCK_K,
            )  # fmt: skip
    if (count > SHORT) & (count <= ROWS):
        _multiply_tile(
            x_ptr, rows, weight, pairs_ptr, shares_ptr, out_ptr, expert, begin, count, first, size,
            DEPTH, CHOSEN, GATED, CUT, BULK, DESCRIBED, ROWS, 0, COLUMNS, BLOCK_K,
        )  # fmt: skip
    if EXTRA:  # noqa: SIM102 - known to the compiler
        if count > ROWS:
            _multiply_tile(
                x_ptr, rows, weight, pairs_ptr, shares_ptr, out_ptr, expert, begin, count, first, size,
                DEPTH, CHOSEN, GATED, CUT, BULK, DESCRIBED, ROWS, EXTRA, COLUMNS, BLOCK_K,
            )  # fmt: skip


def grouped_product_triton(
    x: Tensor,
    stack: Tensor,
    experts: Tensor,
    shares: Tensor,
    groups: PairGroups,
    gated: bool,
    tiles: ExpertTiles,
) -> Tensor:
    """Multiply any number of tokens: [P, I] by place of x [T, H] if `gated`, else [P, H] by pair of x [P, I] by place.

    Args:
        groups: the pairs of `experts` in tiles of `tiles.rows`, and `tiles.extra`.
    """
    size, matrix, out, bulk = prepare(x, stack, experts, shares, gated, tiles)
    if experts.numel():
        described_rows = bulk and not gated
        _grouped_product_kernel[(cdiv(size, tiles.columns), len(groups.tiles))](
            x,
            described(x, tiles.rows, tiles.depth) if described_rows else x,
            described(matrix, tiles.columns, tiles.depth) if bulk else matrix,
            *groups,
            shares,
            out,
            size,
            DEPTH=matrix.shape[1],
            CHOSEN=experts.shape[1],
            GATED=gated,
            CUT=matrix.shape[1] % tiles.depth != 0,
            BULK=bulk,
            DESCRIBED=described_rows,
            ROWS=tiles.rows,
            SHORT=tiles.short,
            EXTRA=tiles.extra,
            FIELDS=FIELDS,
            COLUMNS=tiles.columns,
            BLOCK_K=tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **chained(x.device),
        )
    return out
