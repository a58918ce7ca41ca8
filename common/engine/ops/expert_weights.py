"""Reads tiles of the stacked weights of experts, for kernels with matrix units."""

from __future__ import annotations

from torch import Tensor

from common.engine.ops.expert_tiles import FEW, ExpertTiles
from common.engine.ops.expert_vectors import check_layout
from common.engine.ops.triton_kernel import copies_in_bulk, kernel, tl


@kernel
def weight_tile(  # type: ignore[no-untyped-def]
    weight,  # a descriptor made by `described` if BULK, else a pointer: [all rows, DEPTH]
    first,
    last,
    k,
    DEPTH: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return [COLUMNS, BLOCK_K] from row `first` and column k on; rows from `last` on are undefined."""
    if BULK:
        tile = weight.load([first, k])
    else:
        row, column = first + tl.arange(0, COLUMNS), k + tl.arange(0, BLOCK_K)
        read = (row < last)[:, None]
        if CUT:
            read = read & (column < DEPTH)[None, :]
        tile = tl.load(weight + row.to(tl.int64)[:, None] * DEPTH + column[None, :], mask=read, other=0.0)
    return tile


@kernel
def joined_tile(  # type: ignore[no-untyped-def]
    weight,  # [all rows, DEPTH]
    gates,  # row of the expert's first gate; its up projections follow after `size` rows
    first,
    size,
    k,
    DEPTH: tl.constexpr,
    CUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return [2 * COLUMNS, BLOCK_K] from output column `first` on: eight gates and their up projections in turn."""
    row, depth = tl.arange(0, 2 * COLUMNS), k + tl.arange(0, BLOCK_K)
    column = first + row // 16 * 8 + row % 8
    place = gates + row // 8 % 2 * size + column
    read = (column < size)[:, None]
    if CUT:
        read = read & (depth < DEPTH)[None, :]
    return tl.load(weight + place.to(tl.int64)[:, None] * DEPTH + depth[None, :], mask=read, other=0.0)


@kernel
def separate(both, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return gates and up projections [COLUMNS, ROWS] of a product with a joined tile.

    A thread of the matrix units has rows r and r + 8 of the product, so that no value moves between threads.
    """
    in_turn = tl.reshape(both, (COLUMNS // 8, 2, 8, ROWS))
    gate, up = tl.split(tl.permute(in_turn, (0, 2, 3, 1)))
    return tl.reshape(gate, (COLUMNS, ROWS)), tl.reshape(up, (COLUMNS, ROWS))


def prepare(
    x: Tensor, stack: Tensor, experts: Tensor, shares: Tensor, gated: bool, tiles: ExpertTiles
) -> tuple[int, Tensor, Tensor, bool]:
    """Check the layout; return the output's width, the stack as a matrix, the output, and how tiles are copied."""
    count, width, depth = stack.shape
    check_layout(x, stack, experts, shares)
    rows = stack.view(count * width, depth)
    size = width // 2 if gated else width
    # As in `linear`, bulk copies do not pay for the smallest tile. They copy adjacent rows only.
    bulk = tiles.rows > FEW and not tiles.joined and copies_in_bulk(rows)
    return size, rows, x.new_empty((experts.numel(), size)), bulk
