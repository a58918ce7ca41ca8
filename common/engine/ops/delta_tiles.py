"""Divides the prompt form of gated delta layers among programs, as measured on an H200 (tests/bench/NOTES.md)."""

from __future__ import annotations

from typing import NamedTuple

from common.engine.ops.shared_memory import BARRIER_BYTES, MIN_TILE

CHUNK = 64  # tokens; prompts are cut at multiples of it
PART = 32  # values of a head in a program of the scan
SCAN_STAGES = 4
STEP = 64  # key dimensions that a program of the outputs multiplies at once
OUTPUT_STAGES = 2


class ChunkTiles(NamedTuple):
    """The tiles of all kernels for heads of `keys` and `values` numbers, both rounded up to a power of two."""

    keys: int
    values: int
    chunk: int  # tokens that are computed together, a divisor of CHUNK
    part: int
    scan_stages: int
    step: int
    output_stages: int

    def solve_bytes(self, itemsize: int) -> int:
        """Return the maximum bytes of shared memory of a program that solves the system of a chunk."""
        return 3 * self.chunk * max(self.keys, self.values, self.chunk) * itemsize + BARRIER_BYTES

    def scan_bytes(self, itemsize: int) -> int:
        loaded = self.chunk * (2 * self.keys + self.part) * self.scan_stages
        return (loaded + 2 * self.keys * self.part) * itemsize + BARRIER_BYTES

    def output_bytes(self, itemsize: int) -> int:
        loaded = self.step * (2 * self.chunk + self.values) * self.output_stages
        return max(loaded, self.chunk * (self.chunk + self.values)) * itemsize + BARRIER_BYTES

    def fit(self, itemsize: int, shared: int) -> bool:
        return (
            max(self.solve_bytes(itemsize), self.scan_bytes(itemsize), self.output_bytes(itemsize)) <= shared
        )


def choose_chunks(keys: int, values: int, itemsize: int, shared: int) -> ChunkTiles:
    """Choose tiles that fit into `shared` bytes: fewer loads in flight, then smaller tiles, then shorter chunks.

    Raises RuntimeError if heads are too large for the GPU.
    """
    tiles = ChunkTiles(keys, values, CHUNK, min(values, PART), SCAN_STAGES, min(keys, STEP), OUTPUT_STAGES)
    while tiles.solve_bytes(itemsize) > shared and tiles.chunk > MIN_TILE:
        tiles = tiles._replace(chunk=tiles.chunk // 2)
    while tiles.scan_bytes(itemsize) > shared:
        if tiles.scan_stages > 1:
            tiles = tiles._replace(scan_stages=tiles.scan_stages - 1)
        elif tiles.part > MIN_TILE:
            tiles = tiles._replace(part=tiles.part // 2)
        elif tiles.chunk > MIN_TILE:
            tiles = tiles._replace(chunk=tiles.chunk // 2)
        else:
            break
    while tiles.output_bytes(itemsize) > shared:
        if tiles.output_stages > 1:
            tiles = tiles._replace(output_stages=tiles.output_stages - 1)
        elif tiles.step > MIN_TILE:
            tiles = tiles._replace(step=tiles.step // 2)
        else:
            break
    if not tiles.fit(itemsize, shared):
        raise RuntimeError(
            f"gated delta heads of {keys} keys and {values} values of {itemsize} bytes do not fit the {shared} bytes "
            "of shared memory of this GPU: load the model in 16 bits"
        )
    return tiles
