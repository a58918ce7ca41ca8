"""Shared memory: what a GPU gives a program, what a tile takes of it, and tiles cut until they fit.

Tiles are measured on an H200. Other GPUs have less: 163 KiB (A100), 99 KiB (RTX 3090, 4090 and 5090, A10, L4), and a
kernel that wants more is not launched. The sums are what Triton 3.6 to 3.9 set aside or a little more, on all of these
(tests/unit/engine/test_kernels_compile.py).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from common.engine.ops.triton_kernel import next_power_of_2

LEAST = 16  # rows, keys: what a tile of the matrix units has at least
SHORT = 32  # keys: rather fewer rows than fewer keys
SLACK = 2048  # bytes: reductions and barriers


class Room(NamedTuple):
    """What a program may have of a GPU."""

    shared_bytes: int
    overlapped: bool  # products of 64 rows and more read shared memory while the next step's inputs arrive


H200 = Room(232_448, True)


@functools.cache
def room_of(device: torch.device) -> Room:
    """Of an H200 where there is no GPU."""
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Room(shared_bytes, properties.major not in (8, 12))  # these multiply out of registers


def attention_bytes(rows: int, keys: int, stages: int, head_dim: int, itemsize: int, room: Room) -> int:
    """Of queries [rows, head_dim] over `keys` at a time, whose places are read a stage before them."""
    line = max(next_power_of_2(head_dim), 16) * itemsize
    steps = max((stages - 1) // 2, 1) + (room.overlapped and rows >= 64 and itemsize == 2)
    scores = 0 if rows >= 128 and itemsize == 2 else rows * keys * itemsize  # else in registers
    return (2 * keys * steps + rows) * line + scores + SLACK


def cut_attention(
    rows: int, keys: int, stages: int, head_dim: int, itemsize: int, room: Room, least_rows: int = LEAST
) -> tuple[int, int]:
    """Rows and keys of a tile that fits: half the keys, half the rows, and so on. Raises RuntimeError if none does."""
    while attention_bytes(rows, keys, stages, head_dim, itemsize, room) > room.shared_bytes:
        if keys > SHORT or (keys > LEAST and rows <= least_rows):
            keys //= 2
        elif rows > least_rows:
            rows //= 2
        else:
            raise RuntimeError(
                f"attention over heads of {head_dim} numbers of {itemsize} bytes, {rows} queries to a key head, does "
                f"not fit the {room.shared_bytes} bytes of shared memory of this GPU: load the model in 16 bits"
            )
    return rows, keys
