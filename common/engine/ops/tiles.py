"""Divides products of few rows among programs, as measured with the 8B shape on an H200 (tests/bench/NOTES.md).

A weight [size, depth] is read once, in tiles of its rows, by programs that keep many bytes in flight. If there are
too few tiles for all multiprocessors, the depth is divided as well, and the reader of the result adds up the parts.
"""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.shared_memory import BARRIER_BYTES, H200, programs_together
from common.engine.ops.triton_kernel import cdiv, next_power_of_2

FEW = 16  # rows: the minimum of a tile of the matrix units
MAX_ROWS = 128  # rows: for more, the library is as fast
COLUMNS = 64  # output columns that a program of four warps multiplies at once
STEP = 128  # depth of a step
MAX_PARTS = 8
MIN_STEP = 64  # depth: 128 bytes of a row
# Maximum steps in flight: of the only program of a multiprocessor, and of one that shares it.
ALONE, SHARING = 6, 4
ENOUGH = 3  # steps in flight below which shorter steps are used


class Tiles(NamedTuple):
    """The division of one weight matrix among programs."""

    columns: int  # output columns per program
    depth: int  # depth of a step
    warps: int
    stages: int  # steps in flight
    rows: int = FEW  # of x, in the first tile
    parts: int = 1  # parts of the depth, one program each
    rest: int = 0  # rows of a second tile, which ends with the last row; 0: there is none

    @property
    def most_rows(self) -> int:
        """The maximum number of rows of x."""
        return self.rows + self.rest

    def shared_bytes(self, matrices: int = 1) -> int:
        """Return the maximum bytes of a program; `matrices` is the number of weight tiles that it multiplies."""
        return self.step_bytes(matrices) * self.stages + BARRIER_BYTES

    def step_bytes(self, matrices: int) -> int:
        return (self.most_rows + matrices * self.columns) * self.depth * 2

    def at_once(self, processors: int, matrices: int = 1, shared: int = H200.shared_bytes) -> int:
        """Return the number of programs that run at the same time; `shared` is in bytes per program, at most."""
        return processors * programs_together(shared, self.shared_bytes(matrices))

    def of_rows(self, rows: int) -> Tiles:
        """Return these tiles for x of so many rows."""
        first, rest = split_rows(rows)
        return self._replace(rows=first, rest=rest)

    def with_stages(self, most: int, shared: int, matrices: int = 1) -> Tiles | None:
        """Return the tiles with as many stages as fit, with shorter steps if those are too few; None if they still
        are.
        """
        stages = min(most, (shared - BARRIER_BYTES) // self.step_bytes(matrices))
        if stages >= ENOUGH:
            return self._replace(stages=stages)
        if self.depth == MIN_STEP:
            return None
        return self._replace(depth=self.depth // 2).with_stages(most, shared, matrices)


def choose_tiles(rows: int, size: int, processors: int, shared: int = H200.shared_bytes) -> Tiles | None:
    """Choose tiles for x of `rows` rows and a weight of `size` rows; None if the library is faster.

    `shared` is the number of bytes that a program may use, nearly all of a multiprocessor's.
    """
    programs = cdiv(size, COLUMNS)
    if rows > MAX_ROWS or (rows > MAX_ROWS // 2 and programs > processors):
        return None
    return _if_busy(_fitting(rows, programs, processors, shared), programs, processors, shared)


def choose_gated_tiles(
    rows: int, size: int, processors: int, shared: int = H200.shared_bytes
) -> Tiles | None:
    """Choose tiles for `gated_linear`, whose programs read two tiles of the weight.

    If many multiprocessors would idle in the third turn, programs have fewer bytes in flight, so that three share a
    multiprocessor and all run at once.
    """
    if rows > MAX_ROWS:
        return None
    if rows > MAX_ROWS // 2:
        tiles = Tiles(2 * COLUMNS, STEP // 2, 8, 4)
    else:
        tiles = Tiles(COLUMNS, STEP, 4, 4)
    programs = cdiv(size // 2, tiles.columns)
    fitting = tiles.of_rows(rows).with_stages(tiles.stages, shared, matrices=2)
    if FEW < rows <= MAX_ROWS // 2 and fitting is not None:
        small = fitting._replace(depth=STEP // 2, stages=ENOUGH)
        at_once = fitting.at_once(processors, 2, shared)
        sparse = programs < 0.8 * at_once * cdiv(programs, at_once)
        if sparse and 2 * at_once < programs <= small.at_once(processors, 2, shared):
            return small
    return _if_busy(fitting, programs, processors, shared, matrices=2)


def divide_depth(
    rows: int, size: int, depth: int, processors: int, shared: int = H200.shared_bytes
) -> Tiles | None:
    """Choose tiles for a product whose reader adds up its parts; None if one part is enough or the library is faster.

    The depth is divided into one program per multiprocessor, if that makes two parts or more.
    """
    programs, steps = cdiv(size, COLUMNS), cdiv(depth, STEP)
    if rows > MAX_ROWS or steps < 16 or 3 * programs >= 2 * processors:
        return None
    wanted = max(min(processors // programs, MAX_PARTS), 2)
    parts = cdiv(steps, cdiv(steps, wanted))  # each has at least one step
    tiles = _if_busy(
        _fitting(rows, programs * parts, processors, shared), programs * parts, processors, shared
    )
    return None if tiles is None else tiles._replace(parts=parts)


def whole_tile(rows: int) -> int:
    """Return the rows of a tile that holds so many."""
    return max(FEW, next_power_of_2(rows))


def split_rows(rows: int) -> tuple[int, int]:
    """Return the rows of a tile, and those of a second one that ends with the last row; 0 if one holds all.

    A bulk copy takes time for what lies past the last row: in a tile of 128 rows, 72 took longer than 128
    (tests/bench/NOTES.md, "Steps of 65 to 127 requests").
    """
    half = MAX_ROWS // 2
    return (half, whole_tile(rows - half)) if half < rows < MAX_ROWS else (whole_tile(rows), 0)


def each_division(most: int) -> list[int]:
    """Return the least number of rows, up to `most`, of each way in which products divide them: 1, 2, 17, 33, ..."""
    least: dict[tuple[bool, int, int], int] = {}
    for rows in range(1, most + 1):
        least.setdefault((rows == 1, *split_rows(rows)), rows)  # one row has kernels of its own
    return list(least.values())


def _fitting(rows: int, programs: int, processors: int, shared: int) -> Tiles | None:
    """Return tiles with as many steps in flight as fit; with two programs per multiprocessor if there are enough."""
    tiles = Tiles(COLUMNS, STEP, 4, ALONE).of_rows(rows)
    if programs <= processors:
        return tiles.with_stages(ALONE, shared)
    return tiles.with_stages(SHARING, shared // 2)


def _if_busy(
    tiles: Tiles | None, programs: int, processors: int, shared: int, matrices: int = 1
) -> Tiles | None:
    """Return `tiles` if they keep the memory busy and, with more rows, few processors idle in the last wave."""
    if tiles is None:
        return None
    if tiles.rows == FEW:
        return tiles if 3 * programs >= 2 * processors else None
    at_once = tiles.at_once(processors, matrices, shared)
    return tiles if programs >= 0.7 * at_once * cdiv(programs, at_once) else None
