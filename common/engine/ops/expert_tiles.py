"""Divides the products of experts among programs, from the sizes and the resources of the GPU."""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.shared_memory import BARRIER_BYTES
from common.engine.ops.triton_kernel import cdiv, next_power_of_2

FEW = 16  # rows: the minimum of a tile of the matrix units
FEW_TOKENS = 64  # for more, pairs are grouped by expert
COLUMNS, NARROW = 64, 32  # output columns of a program
STEP, MIN_STEP = 128, 32  # depth of a step
MAX_STAGES, FEW_STAGES, JOINED_STAGES = 4, 3, 5
# Tiles of many tokens use these, as measured on an H200 (tests/bench/NOTES.md).
MIN_ROWS, MAX_ROWS = 32, 128
EXTRA, LARGE_EXTRA = 16, 32


class ExpertTiles(NamedTuple):
    """The tile of one program."""

    columns: int  # output columns
    depth: int  # depth per step
    rows: int  # pairs
    warps: int
    stages: int  # steps in flight
    # With many tokens the last tile of an expert has up to `extra` more pairs, or at most `short`.
    short: int = 0
    extra: int = 0
    # A program reads its gates and up projections as one tile of twice as many rows: smaller programs, and one product.
    joined: bool = False

    def shared_bytes(self, itemsize: int, gated: bool) -> int:
        """Return the maximum bytes of a program; a gated one reads two tiles of the weight in each step."""
        lines = self.columns * (2 if gated else 1) + self.rows + self.extra
        return lines * self.depth * itemsize * self.stages + BARRIER_BYTES

    def fitted(self, itemsize: int, gated: bool, shared: int) -> ExpertTiles:
        """Return the tile with fewer or shorter steps in flight, so that it fits into `shared` bytes."""
        tiles = self
        while tiles.shared_bytes(itemsize, gated) > shared and tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        if tiles.shared_bytes(itemsize, gated) <= shared or tiles.depth == MIN_STEP:
            return tiles
        return self._replace(depth=self.depth // 2).fitted(itemsize, gated, shared)


def choose_few(
    tokens: int, used: int, size: int, itemsize: int, gated: bool, processors: int, shared: int
) -> ExpertTiles:
    """Choose tiles for at most FEW_TOKENS tokens, so that two programs share a multiprocessor.

    Args:
        used: the most experts that these tokens may use.
        size: output columns of an expert.
    """
    rows = max(FEW, next_power_of_2(tokens))
    if gated and rows == FEW:
        joined = ExpertTiles(NARROW, STEP, FEW, 4, JOINED_STAGES, joined=True)
        return joined.fitted(itemsize, gated, shared // 2)
    columns = COLUMNS if 2 * used * cdiv(size, COLUMNS) >= processors else NARROW
    # The depth of a down product has few steps: three programs per multiprocessor are better than more stages.
    stages = MAX_STAGES if gated or rows > FEW else FEW_STAGES
    tiles = ExpertTiles(columns, STEP if rows == FEW else STEP // 2, rows, 4, stages)
    return tiles.fitted(itemsize, gated, shared // 2)


def choose_many(pairs: int, experts: int, itemsize: int, gated: bool, shared: int) -> ExpertTiles:
    """Choose tiles for many tokens, from the pairs that an expert has on average.

    The largest tile, of two weights and 128 rows, has a multiprocessor for itself; two of the others share one.
    Experts have a few pairs more or less than the average, so the last tile of an expert may have a product of half as
    many rows, or one of some more, for which float32 has no room. The rows do not depend on `gated`: both products of
    an expert have the same tiles.
    """
    rows = min(max(next_power_of_2(cdiv(pairs, experts)), MIN_ROWS), MAX_ROWS)
    large = rows == MAX_ROWS
    columns = 2 * COLUMNS if large or not gated else COLUMNS
    extra = 0 if itemsize > 2 else LARGE_EXTRA if large else EXTRA
    tiles = ExpertTiles(columns, STEP // 2, rows, 8 if large else 4, MAX_STAGES, rows // 2, extra)
    return tiles.fitted(itemsize, gated, shared if large and gated else shared // 2)
