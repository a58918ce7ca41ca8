"""Reads, writes and copies equally spaced rows of bytes in host memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_transfer.copy_plan import Copy

Bytes = memoryview | bytes | bytearray


def gather(memory: Bytes, start: int, length: int, rows: int, stride: int) -> memoryview:
    """Return `rows` rows of `length` bytes, concatenated. A single row is a view, several rows are a copy."""
    if rows == 1:
        return memoryview(memory)[start : start + length]
    return _rows(memory, start, length, rows, stride).copy().reshape(-1).data


def scatter(memory: memoryview, start: int, length: int, rows: int, stride: int, data: Bytes) -> None:
    """Write the result of `gather` to rows whose stride may differ."""
    if rows == 1:
        memory[start : start + length] = data
    else:
        _rows(memory, start, length, rows, stride)[:] = np.frombuffer(data, np.uint8).reshape(rows, length)


def copy_rows(source: memoryview, target: memoryview, copy: Copy) -> None:
    """Execute one copy between two pools in host memory."""
    if copy.rows == 1:
        target[copy.dst : copy.dst + copy.length] = source[copy.src : copy.src + copy.length]
        return
    into = _rows(target, copy.dst, copy.length, copy.rows, copy.dst_stride)
    into[:] = _rows(source, copy.src, copy.length, copy.rows, copy.src_stride)


def _rows(memory: Bytes, start: int, length: int, rows: int, stride: int) -> NDArray[np.uint8]:
    """Return a [rows, length] view. Raises ValueError if it does not lie inside `memory`."""
    flat = np.frombuffer(memory, np.uint8)
    if start < 0 or start + (rows - 1) * stride + length > flat.size:
        raise ValueError(f"{rows} rows from byte {start} do not lie inside {flat.size} bytes")
    return np.lib.stride_tricks.as_strided(flat[start:], (rows, length), (stride, 1))
