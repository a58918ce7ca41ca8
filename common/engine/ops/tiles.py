"""How products of few rows are divided among programs: measured with the 8B shape on an H200 (tests/bench/NOTES.md).

A weight [size, depth] is read once, in tiles of its rows, by programs that keep many bytes on the way. Where there are
too few tiles for all multiprocessors the depth is divided as well, and what reads the result adds the parts up.
"""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.triton_kernel import cdiv, next_power_of_2

FEW = 16  # rows: what a tile of the matrix units has at least
MOST = 128  # rows: above, the library is as fast
COLUMNS = 64  # of the output: what a program of four warps multiplies at once
STEP = 128  # of the depth
MOST_PARTS = 8
SHARED = 227 << 10  # bytes of a multiprocessor's programs
ALONE, SHARING = 6, 4  # steps on the way, at most: of the only program of a multiprocessor, of one of several


class Tiles(NamedTuple):
    """How one weight matrix is divided."""

    columns: int  # of the output, per program
    depth: int  # of a step
    warps: int
    stages: int  # steps on the way
    rows: int = FEW  # of x, at most
    parts: int = 1  # of the depth, a program each

    def at_once(self, processors: int, matrices: int = 1) -> int:
        """Programs that run at the same time; `matrices`: tiles of the weight that each multiplies."""
        nbytes = (self.rows + matrices * self.columns) * self.depth * 2 * self.stages
        return processors * max(SHARED // nbytes, 1)


def choose_tiles(rows: int, size: int, processors: int) -> Tiles | None:
    """For x of so many rows and a weight of `size` rows; None where the library is faster."""
    programs = cdiv(size, COLUMNS)
    if rows > MOST or (rows > MOST // 2 and programs > processors):
        return None
    tiles = _fitting(rows, programs, processors)
    return tiles if _keep_busy(tiles, programs, processors) else None


def choose_gated_tiles(rows: int, size: int, processors: int) -> Tiles | None:
    """The same for `gated_linear`, whose programs read two tiles of the weight."""
    if rows > MOST:
        return None
    if rows > MOST // 2:
        tiles = Tiles(2 * COLUMNS, STEP // 2, 8, 4, MOST)
    else:
        tiles = Tiles(COLUMNS, STEP, 4, 4, _room(rows))
    programs = cdiv(size // 2, tiles.columns)
    return tiles if _keep_busy(tiles, programs, processors, matrices=2) else None


def divide_depth(rows: int, size: int, depth: int, processors: int) -> Tiles | None:
    """For a product whose parts are added up by what reads them; None where one part is enough, or the library.

    Into one program for each multiprocessor, if that makes two parts or more.
    """
    programs, steps = cdiv(size, COLUMNS), cdiv(depth, STEP)
    if rows > MOST or steps < 16 or 3 * programs >= 2 * processors:
        return None
    wanted = max(min(processors // programs, MOST_PARTS), 2)
    parts = cdiv(steps, cdiv(steps, wanted))  # none without a step
    tiles = _fitting(rows, programs * parts, processors)._replace(parts=parts)
    return tiles if _keep_busy(tiles, programs * parts, processors) else None


def _room(rows: int) -> int:
    return max(FEW, next_power_of_2(rows))


def _fitting(rows: int, programs: int, processors: int) -> Tiles:
    """With as many steps on the way as there is room for; two programs at once where there are enough."""
    step = (_room(rows) + COLUMNS) * STEP * 2
    stages = min(ALONE, SHARED // step) if programs <= processors else min(SHARING, SHARED // 2 // step)
    return Tiles(COLUMNS, STEP, 4, stages, _room(rows))


def _keep_busy(tiles: Tiles, programs: int, processors: int, matrices: int = 1) -> bool:
    """Whether the memory is busy; with more rows also that few processors wait for the last programs to end."""
    if tiles.rows == FEW:
        return 3 * programs >= 2 * processors
    at_once = tiles.at_once(processors, matrices)
    return programs >= 0.7 * at_once * cdiv(programs, at_once)
