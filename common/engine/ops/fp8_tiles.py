"""Divides FP8 products among programs, as measured with the 8B shape on an H200 (tests/bench/NOTES.md)."""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.fp8_codes import GROUP
from common.engine.ops.shared_memory import BARRIER_BYTES, H200, programs_together
from common.engine.ops.triton_kernel import cdiv, next_power_of_2

MIN_ROWS = 16  # of a tile of the matrix units
MAX_ROWS = 128  # of a tile
COLUMNS = 64  # output columns of a program of four warps
# Steps in flight: of the only program of a multiprocessor, and of each of two.
ALONE, SHARING = 8, 4
ENOUGH = 3  # steps in flight below which programs do not share
# Programs per multiprocessor among which a product's depth is divided, with scales per channel and per block.
CHANNEL_PROGRAMS, BLOCK_PROGRAMS = 1, 2
# Values of a row and a column that the matrix units add up before float32 takes over, with scales per channel. Of 512
# values of one sign they lose 0.7 %, of 128 0.08 %. Products without an activation gain nothing from it with MIN_ROWS
# rows and fewer, except those of experts (`fp8_grouped`).
SUMMED = 512
# Rows up to which a gated product with one accumulator is faster than one with two, and its steps in flight.
GATED_ROWS, GATED_STAGES = 64, 3
# Steps in flight of gated products whose programs would otherwise take two turns.
CROWDED_STAGES = 2
# Depth and number of the steps in flight of the only program of a multiprocessor that adds them up.
DEEP, DEEP_STAGES = 256, 4
# Rows up to which these kernels are faster than the library's, with scales per channel and per block.
CHANNEL_ROWS, BLOCK_ROWS = 128, 64


class Fp8Tiles(NamedTuple):
    """The division of one product among programs."""

    columns: int  # output columns per program
    depth: int  # of a step
    warps: int
    stages: int  # steps in flight
    rows: int = MIN_ROWS  # of x per program
    parts: int = 1  # of the depth, one program each
    bulk: bool = False  # use bulk copies where the GPU has them
    together: int = 1  # steps that the matrix units add up before float32 takes over

    def step_bytes(self, matrices: int) -> int:
        return (self.rows + matrices * self.columns) * self.depth

    def shared_bytes(self, matrices: int = 1) -> int:
        """Return the maximum bytes of a program; `matrices` is the number of weight tiles that it multiplies."""
        return self.step_bytes(matrices) * self.stages + BARRIER_BYTES

    def at_once(self, processors: int, shared: int) -> int:
        """Return the number of programs that run at the same time; `shared` is in bytes per program, at most."""
        return processors * programs_together(shared, self.shared_bytes())

    def fitting(self, shared: int, matrices: int = 1) -> Fp8Tiles:
        """Return the tiles with fewer steps in flight if those that were measured do not fit."""
        most = (shared - BARRIER_BYTES) // self.step_bytes(matrices)
        return self._replace(stages=max(min(self.stages, most), 1))


def library_is_faster(rows: int, blocks: bool) -> bool:
    """Return whether the library's product is faster for this many rows.

    Args:
        blocks: the weight has scales per block.
    """
    return rows > (BLOCK_ROWS if blocks else CHANNEL_ROWS)


def choose_fp8_tiles(
    rows: int, size: int, blocks: bool, processors: int, shared: int = H200.shared_bytes
) -> Fp8Tiles:
    """Choose tiles for x of `rows` rows and a weight of `size` rows, in one part.

    Args:
        blocks: the weight has scales per block, so that a step has the depth of one.
        shared: bytes that a program may use, nearly all of a multiprocessor's.
    """
    alone = not blocks and cdiv(size, COLUMNS) * cdiv(rows, MAX_ROWS) <= processors
    return _tiles(rows, alone, shared, summed=GROUP if blocks else SUMMED)


def choose_fp8_gated_tiles(
    rows: int, size: int, depth: int, blocks: bool, processors: int, shared: int = H200.shared_bytes
) -> Fp8Tiles | None:
    """Choose tiles for a product of gates and up projections with its activation; None if the library is faster.

    With `together` over 1 the gates and the up projections have one accumulator (`fp8_gated_triton`), else one each.

    Args:
        size: gates and up projections.
    """
    if library_is_faster(rows, blocks):
        return None
    two = _tiles(rows, rows <= MIN_ROWS and not blocks, shared, matrices=2)
    if rows > GATED_ROWS or blocks or depth % SUMMED != 0:
        return two
    programs = cdiv(size // 2, COLUMNS)
    # Not measured: GPUs with less shared memory, which multiply from registers and await each step anyway, and programs
    # that have a multiprocessor each, which need more steps in flight.
    if shared < H200.shared_bytes or programs <= processors:
        return two
    one = Fp8Tiles(COLUMNS, DEEP, 4, GATED_STAGES, two.rows, bulk=two.bulk, together=SUMMED // DEEP)
    # Twice the columns if nearly every multiprocessor then has one program, and none a second one after it.
    if two.rows == GATED_ROWS and 3 * processors <= 2 * programs <= 4 * processors:
        return one._replace(columns=2 * COLUMNS, warps=8)
    # A second turn of few programs would take as long as the first, with most multiprocessors idle.
    crowded = one._replace(stages=CROWDED_STAGES)
    for tiles in (one, crowded, crowded._replace(columns=2 * COLUMNS, warps=8)):
        if cdiv(size // 2, tiles.columns) <= tiles.at_once(processors, shared):
            return tiles
    return one


def divide_fp8_depth(
    rows: int, size: int, depth: int, blocks: bool, processors: int, shared: int = H200.shared_bytes
) -> Fp8Tiles | None:
    """Choose tiles for a product whose reader adds up its parts; None if one part is enough.

    The depth is divided into one program per multiprocessor, or with scales per block into two.
    """
    programs_each = BLOCK_PROGRAMS if blocks else CHANNEL_PROGRAMS
    tiles = _tiles(rows, programs_each == 1, shared, summed=GROUP if blocks else SUMMED)
    programs, steps = cdiv(size, tiles.columns), cdiv(depth, tiles.depth)
    if library_is_faster(rows, blocks) or steps < 8 or 3 * programs >= 2 * processors:
        return None
    wanted = max(min(programs_each * processors // programs, 8), 2)
    return tiles._replace(parts=cdiv(steps, cdiv(steps, wanted)))


def _tiles(rows: int, alone: bool, shared: int, matrices: int = 1, summed: int = GROUP) -> Fp8Tiles:
    """Return tiles for programs that have a multiprocessor each if `alone`, else share one if there is room for two.

    Args:
        summed: values that the matrix units may add up.
    """
    room = max(MIN_ROWS, min(next_power_of_2(rows), MAX_ROWS))
    several = room > MIN_ROWS and summed > GROUP
    tiles = Fp8Tiles(COLUMNS, GROUP, 4, SHARING, room, bulk=room > MIN_ROWS)
    if several:
        tiles = tiles._replace(together=summed // GROUP)
    shares = tiles.fitting(shared // 2, matrices)
    if not alone and shares.stages >= ENOUGH:
        return shares
    deep = tiles._replace(depth=DEEP, stages=DEEP_STAGES, together=summed // DEEP)
    if several and deep.shared_bytes() <= shared:
        return deep
    return tiles._replace(stages=ALONE).fitting(shared, matrices)
