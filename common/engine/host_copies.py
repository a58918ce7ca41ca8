"""Copies between host and device on the current stream: nobody waits for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for a pointer that is no multiple of it


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64, by one copy from pinned memory."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def send(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Arrays on the device, by one copy of one pinned block; on a CPU the arrays themselves.

    Blocks come from torch's cache of pinned memory, which gives one out again only when its copy is done: nothing
    waits, and after the first steps nothing is allocated.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    block = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, block)
    return unpack(arrays, block.to(device, non_blocking=True))


def send_one(array: Array, device: torch.device) -> Tensor:
    return send((array,), device)[0]


def packed_bytes(arrays: Sequence[Array]) -> int:
    return sum(_room(array) for array in arrays)


def pack(arrays: Sequence[Array], block: Tensor) -> None:
    """Into a block [packed_bytes] uint8 of host memory, those of one dtype one behind another."""
    memory, start = block.numpy(), 0
    for group in _by_dtype(arrays).values():
        for index in group:
            array = arrays[index]
            memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            start += _room(array)


def unpack(arrays: Sequence[Array], block: Tensor) -> list[Tensor]:
    """Views of a packed block with the shapes and dtypes of `arrays`: few calls for many arrays, as steps wait."""
    views, start = [block] * len(arrays), 0
    for dtype, group in _by_dtype(arrays).items():
        rooms = [_room(arrays[index]) for index in group]
        end = start + sum(rooms)
        elements = [number for index, room in zip(group, rooms) for number in _elements(arrays[index], room)]
        for index, view in zip(
            group, torch.split_with_sizes(block[start:end].view(_of_torch(dtype)), elements)[::2]
        ):
            shape = arrays[index].shape
            views[index] = view if len(shape) == 1 else view.view(shape)
        start = end
    return views


def _by_dtype(arrays: Sequence[Array]) -> dict[np.dtype[np.generic], list[int]]:
    groups: dict[np.dtype[np.generic], list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(array.dtype, []).append(index)
    return groups


def _elements(array: Array, room: int) -> tuple[int, int]:
    """Of an array, and of the gap behind it."""
    return array.size, room // array.itemsize - array.size


@functools.cache
def _of_torch(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def _room(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, to be read once the stream has come here; on a CPU the tensor itself.

    Read from the device itself it would come behind whatever was launched since: a whole step late.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
