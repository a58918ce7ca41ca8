"""How products of few rows are divided among programs: measured with the 8B shape on an H200 (tests/bench/NOTES.md).

A weight [size, depth] is read once, in tiles of its rows, by programs that keep many bytes on the way. Where there are
too few tiles for all multiprocessors the depth is divided as well, and what reads the result adds the parts up.
"""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.shared_memory import H200, SLACK
from common.engine.ops.triton_kernel import cdiv, next_power_of_2

FEW = 16  # rows: what a tile of the matrix units has at least
MOST = 128  # rows: above, the library is as fast
COLUMNS = 64  # of the output: what a program of four warps multiplies at once
STEP = 128  # of the depth
MOST_PARTS = 8
LEAST_STEP = 64  # 128 bytes of a row
ALONE, SHARING = 6, 4  # steps on the way, at most: of the only program of a multiprocessor, of one of several
ENOUGH = 3  # of them: with fewer, shorter steps


class Tiles(NamedTuple):
    """How one weight matrix is divided."""

    columns: int  # of the output, per program
    depth: int  # of a step
    warps: int
    stages: int  # steps on the way
    rows: int = FEW  # of x, at most
    parts: int = 1  # of the depth, a program each

    def shared_bytes(self, matrices: int = 1) -> int:
        """Of a program, at most; `matrices`: tiles of the weight that it multiplies."""
        return self.step_bytes(matrices) * self.stages + SLACK

    def step_bytes(self, matrices: int) -> int:
        return (self.rows + matrices * self.columns) * self.depth * 2

    def at_once(self, processors: int, matrices: int = 1, shared: int = H200.shared_bytes) -> int:
        """Programs that run at the same time. shared: bytes of a multiprocessor."""
        return processors * max(shared // self.shared_bytes(matrices), 1)

    def with_stages(self, most: int, shared: int, matrices: int = 1) -> Tiles | None:
        """With as many as there is room for, of shorter steps if that were too few; None if those are, too."""
        stages = min(most, (shared - SLACK) // self.step_bytes(matrices))
        if stages >= ENOUGH:
            return self._replace(stages=stages)
        if self.depth == LEAST_STEP:
            return None
        return self._replace(depth=self.depth // 2).with_stages(most, shared, matrices)


def choose_tiles(rows: int, size: int, processors: int, shared: int = H200.shared_bytes) -> Tiles | None:
    """For x of so many rows and a weight of `size` rows; None where the library is faster.

    shared: bytes that a program may have, and nearly all of a multiprocessor's.
    """
    programs = cdiv(size, COLUMNS)
    if rows > MOST or (rows > MOST // 2 and programs > processors):
        return None
    return _if_busy(_fitting(rows, programs, processors, shared), programs, processors, shared)


def choose_gated_tiles(
    rows: int, size: int, processors: int, shared: int = H200.shared_bytes
) -> Tiles | None:
    """The same for `gated_linear`, whose programs read two tiles of the weight."""
    if rows > MOST:
        return None
    if rows > MOST // 2:
        tiles = Tiles(2 * COLUMNS, STEP // 2, 8, 4, MOST)
    else:
        tiles = Tiles(COLUMNS, STEP, 4, 4, _room(rows))
    programs, fitting = cdiv(size // 2, tiles.columns), tiles.with_stages(tiles.stages, shared, matrices=2)
    return _if_busy(fitting, programs, processors, shared, matrices=2)


def divide_depth(
    rows: int, size: int, depth: int, processors: int, shared: int = H200.shared_bytes
) -> Tiles | None:
    """For a product whose parts are added up by what reads them; None where one part is enough, or the library.

    Into one program for each multiprocessor, if that makes two parts or more.
    """
    programs, steps = cdiv(size, COLUMNS), cdiv(depth, STEP)
    if rows > MOST or steps < 16 or 3 * programs >= 2 * processors:
        return None
    wanted = max(min(processors // programs, MOST_PARTS), 2)
    parts = cdiv(steps, cdiv(steps, wanted))  # none without a step
    tiles = _if_busy(
        _fitting(rows, programs * parts, processors, shared), programs * parts, processors, shared
    )
    return None if tiles is None else tiles._replace(parts=parts)


def _room(rows: int) -> int:
    return max(FEW, next_power_of_2(rows))


def _fitting(rows: int, programs: int, processors: int, shared: int) -> Tiles | None:
    """With as many steps on the way as there is room for; two programs at once where there are enough."""
    tiles = Tiles(COLUMNS, STEP, 4, ALONE, _room(rows))
    if programs <= processors:
        return tiles.with_stages(ALONE, shared)
    return tiles.with_stages(SHARING, shared // 2)


def _if_busy(
    tiles: Tiles | None, programs: int, processors: int, shared: int, matrices: int = 1
) -> Tiles | None:
    """If the memory is busy; with more rows also if few processors wait for the last programs to end."""
    if tiles is None:
        return None
    if tiles.rows == FEW:
        return tiles if 3 * programs >= 2 * processors else None
    at_once = tiles.at_once(processors, matrices, shared)
    return tiles if programs >= 0.7 * at_once * cdiv(programs, at_once) else None
