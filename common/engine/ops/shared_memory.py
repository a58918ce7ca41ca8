"""Shared memory: how much a GPU gives a program, how much a tile needs, and tiles that are reduced until they fit.

Tiles are measured on an H200. Other GPUs have less: 163 KiB (A100), 99 KiB (RTX 3090, 4090 and 5090, A10, L4), and a
kernel that needs more fails to launch. The computed sizes are what Triton 3.6 to 3.9 reserves, or a little more, on
all of these (tests/unit/engine/test_kernels_compile.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from common.engine.ops.triton_kernel import next_power_of_2

# What a GPU reserves for each program (CUDA C++ programming guide, from compute capability 8.0 on).
RESERVED_BYTES = 1024
MIN_TILE = 16  # rows or keys: the minimum of a tile of the matrix units
SHORT = 32  # keys: below this, rows are reduced before keys
BARRIER_BYTES = 2048  # for reductions and barriers


class SharedMemory(NamedTuple):
    """The resources that a GPU gives a program."""

    shared_bytes: int
    overlapped: bool  # products of 64 rows and more read shared memory while the inputs of the next step load


H200 = SharedMemory(232_448, True)


@functools.cache
def room_of(device: torch.device) -> SharedMemory:
    """Return the resources of the device; those of an H200 if it is not a GPU."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return SharedMemory(shared_bytes, properties.major not in (8, 12))  # these multiply from registers


def programs_together(shared: int, used: int) -> int:
    """Return how many programs that use so many bytes share a multiprocessor, at least one.

    Args:
        shared: bytes that a program may use; then it has a multiprocessor to itself.
    """
    return max((shared + RESERVED_BYTES) // (used + RESERVED_BYTES), 1)


def attention_bytes(
    rows: int, keys: int, stages: int, head_dim: int, itemsize: int, room: SharedMemory
) -> int:
    """Return the bytes for queries [rows, head_dim] over `keys` at a time, whose slots are read a stage earlier."""
    line = max(next_power_of_2(head_dim), 16) * itemsize
    steps = max((stages - 1) // 2, 1) + (room.overlapped and rows >= 64 and itemsize == 2)
    # Scores of many rows stay in registers.
    scores = 0 if rows >= 128 and itemsize == 2 else rows * keys * itemsize
    return (2 * keys * steps + rows) * line + scores + BARRIER_BYTES


def cut_attention(
    rows: int,
    keys: int,
    stages: int,
    head_dim: int,
    itemsize: int,
    room: SharedMemory,
    min_rows: int = MIN_TILE,
) -> tuple[int, int]:
    """Return rows and keys of a tile that fits, halving keys and rows in turn. Raises RuntimeError if none fits."""
    while attention_bytes(rows, keys, stages, head_dim, itemsize, room) > room.shared_bytes:
        if keys > SHORT or (keys > MIN_TILE and rows <= min_rows):
            keys //= 2
        elif rows > min_rows:
            rows //= 2
        else:
            raise RuntimeError(
                f"attention over heads of {head_dim} numbers of {itemsize} bytes, {rows} queries to a key head, does "
                f"not fit the {room.shared_bytes} bytes of shared memory of this GPU: load the model in 16 bits"
            )
    return rows, keys
