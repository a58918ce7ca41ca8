"""Divides FP8 products among programs, as measured with the 8B shape on an H200 (tests/bench/NOTES.md)."""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.fp8_codes import GROUP
from common.engine.ops.shared_memory import BARRIER_BYTES, H200
from common.engine.ops.triton_kernel import cdiv, next_power_of_2

LEAST_ROWS = 16  # of a tile of the matrix units
# Rows from which on the library's product is faster, for scales per channel and per block.
LIBRARY_ROWS = {False: 65, True: 65}


class Fp8Tiles(NamedTuple):
    """The division of one product among programs."""

    columns: int  # output columns per program
    depth: int  # of a step
    warps: int
    stages: int  # steps in flight
    rows: int = LEAST_ROWS  # of x per program
    parts: int = 1  # of the depth, one program each
    bulk: bool = False  # use bulk copies where the GPU has them

    def step_bytes(self, matrices: int) -> int:
        return (self.rows + matrices * self.columns) * self.depth

    def shared_bytes(self, matrices: int = 1) -> int:
        """Return the maximum bytes of a program; `matrices` is the number of weight tiles that it multiplies."""
        return self.step_bytes(matrices) * self.stages + BARRIER_BYTES

    def fitting(self, shared: int, matrices: int = 1) -> Fp8Tiles:
        """Return the tiles with fewer steps in flight if those that were measured do not fit."""
        most = (shared - BARRIER_BYTES) // self.step_bytes(matrices)
        return self._replace(stages=max(min(self.stages, most), 1))


def library_is_faster(rows: int, blocks: bool) -> bool:
    """Return whether the library's product is faster for so many rows.

    Args:
        blocks: the weight has scales per block.
    """
    return rows >= LIBRARY_ROWS[blocks]


def choose_fp8_tiles(
    rows: int, size: int, blocks: bool, processors: int, shared: int = H200.shared_bytes
) -> Fp8Tiles:
    """Choose tiles for x of `rows` rows and a weight of `size` rows, in one part.

    Args:
        blocks: the weight has scales per block, so that a step has the depth of one.
        shared: bytes that a program may use, nearly all of a multiprocessor's.
    """
    room = max(LEAST_ROWS, min(next_power_of_2(rows), 128))
    step = GROUP if blocks or room > 64 else 2 * GROUP
    if room > 64:
        return Fp8Tiles(128, step, 8, 4, room, bulk=True).fitting(shared)
    alone = cdiv(size, 64) <= processors
    tiles = Fp8Tiles(64, step, 4, 6 if alone else 4, room, bulk=room > LEAST_ROWS)
    return tiles.fitting(shared if alone else shared // 2)


def choose_fp8_gated_tiles(
    rows: int, size: int, blocks: bool, shared: int = H200.shared_bytes
) -> Fp8Tiles | None:
    """Choose tiles for a product with its activation; None for so many rows that two kernels are as fast.

    Args:
        size: rows of the weight, gates and up projections.
    """
    if rows > 64:
        return None
    room = max(LEAST_ROWS, next_power_of_2(rows))
    return Fp8Tiles(64, GROUP, 4, 6, room, bulk=room > LEAST_ROWS).fitting(shared // 2, matrices=2)


def divide_fp8_depth(
    rows: int, size: int, depth: int, blocks: bool, processors: int, shared: int = H200.shared_bytes
) -> Fp8Tiles | None:
    """Choose tiles for a product whose reader adds up its parts; None if one part is enough.

    The depth is divided into one program per multiprocessor, if that makes two parts or more.
    """
    tiles = choose_fp8_tiles(rows, size, blocks, processors, shared)
    programs, steps = cdiv(size, tiles.columns), cdiv(depth, tiles.depth)
    if rows > 64 or steps < 8 or 3 * programs >= 2 * processors:
        return None
    wanted = max(min(processors // programs, 8), 2)
    parts = cdiv(steps, cdiv(steps, wanted))
    return tiles._replace(parts=parts)
