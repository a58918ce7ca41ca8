"""Copies between host and device on the current stream: nobody waits for them."""

from __future__ import annotations

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
    """Into a block [packed_bytes] uint8 of host memory."""
    memory, start = block.numpy(), 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        memory[start : start + len(flat)] = flat
        start += _room(array)


def unpack(arrays: Sequence[Array], block: Tensor) -> list[Tensor]:
    """Views of a packed block with the shapes and dtypes of `arrays`."""
    views, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views.append(block[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _room(array)
    return views


def _room(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, to be read once the stream has come here; on a CPU the tensor itself.

    Read from the device itself it would come behind whatever was launched since: a whole step late.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
