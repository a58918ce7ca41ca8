"""Copies between host and device on the current stream; they never block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]
ALIGNMENT = 16  # bytes; Triton compiles a kernel again for a pointer that is not a multiple of it


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return `values` as int64 on the device, by one copy from pinned memory."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def send(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return arrays on the device, by one copy of one pinned block; on a CPU the arrays themselves.

    Blocks come from torch's cache of pinned memory, which reuses one only after its copy is done, so nothing waits,
    and after the first steps nothing is allocated.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    packing = Packing(arrays)
    block = torch.empty(packing.nbytes, dtype=torch.uint8, pin_memory=True)
    packing.fill(block)
    return packing.views(block.to(device, non_blocking=True))


def send_one(array: Array, device: torch.device) -> Tensor:
    return send((array,), device)[0]


class Packing:
    """Layout of arrays in one block: arrays of one dtype are adjacent, each at a multiple of ALIGNMENT.

    It makes few calls for many arrays, because a prompt waits for them.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = [np.ascontiguousarray(array) for array in arrays]
        self._runs: list[_Run] = []
        owners: dict[np.dtype[np.generic], list[int]] = {}
        for index, array in enumerate(self._arrays):
            owners.setdefault(array.dtype, []).append(index)
        self.nbytes = 0
        for dtype, group in owners.items():
            aligned = ALIGNMENT // dtype.itemsize
            counts = [self._arrays[index].size for index in group]
            elements = [number for count in counts for number in (count, -count % aligned)]
            begin, self.nbytes = self.nbytes, self.nbytes + sum(elements) * dtype.itemsize
            self._runs.append(_Run(dtype, group, elements, begin, self.nbytes))

    def fill(self, block: Tensor) -> None:
        """Write the arrays into a block [nbytes] uint8 of host memory."""
        memory = block.numpy()
        for run in self._runs:
            flat, start = memory[run.begin : run.end].view(run.dtype), 0
            for index, count, gap in zip(run.owners, run.elements[::2], run.elements[1::2]):
                flat[start : start + count] = self._arrays[index].reshape(-1)
                start += count + gap

    def views(self, block: Tensor) -> list[Tensor]:
        """Return the arrays as views of a block [nbytes] uint8 on any device."""
        found = [block] * len(self._arrays)
        for run in self._runs:
            flat = block[run.begin : run.end].view(_of_torch(run.dtype))
            for index, view in zip(run.owners, torch.split_with_sizes(flat, run.elements)[::2]):
                shape = self._arrays[index].shape
                found[index] = view if len(shape) == 1 else view.view(shape)
        return found


class _Run(NamedTuple):
    """Arrays of one dtype in bytes begin .. end of a block."""

    dtype: np.dtype[np.generic]
    owners: list[int]
    elements: list[int]  # elements of each array, and of the gap after it
    begin: int
    end: int


@functools.cache
def _of_torch(dtype: np.dtype[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype


def copy_on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory of its own; on a GPU it is readable once the stream reaches this point."""
    return memory_for_copy(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def memory_for_copy(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for a copy from the device, pinned for a GPU unless no memory can be pinned.

    The host waits for a copy to memory that is not pinned: slow, but the node goes on.
    """
    if device.type == "cuda":
        # A GPU that has failed fails again at the copy.
        with contextlib.suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, readable once the stream reaches this point; on a CPU the tensor itself.

    A read from the device itself would wait for all work launched since: a whole step too long.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class RowCopies:
    """Copies one row of each of several tensors to host memory, and back into a row."""

    def __init__(self, parts: Iterable[Tensor]) -> None:
        self._parts = tuple(parts)

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each tensor that `copy_out` returns."""
        return [part[0].nbytes for part in self._parts]

    def copy_out(self, row: int) -> list[Tensor]:
        """Return copies of a row; on a GPU they are readable once the stream reaches this point."""
        return [copy_on_host(part[row]) for part in self._parts]

    def copy_in(self, row: int, backup: Sequence[Tensor]) -> None:
        """Write what `copy_out` returned into a row, which may be another one than it came from."""
        for part, source in zip(self._parts, backup, strict=True):
            part[row].copy_(source, non_blocking=True)
