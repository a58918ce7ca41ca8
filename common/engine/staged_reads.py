"""Reads blocks of safetensors files to a GPU: threads copy the mapped file into a ring of pinned buffers.

    file (mapped)  --THREADS threads-->  SLOTS buffers of SLOT_BYTES  --copies on the current stream-->  block

A copy from pageable memory, as safetensors makes it, runs in one thread and waits for page faults and for the GPU in
turn. Here later blocks are read while earlier ones are copied and, on the same stream, converted.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.checkpoint.model_directory import opened
from common.checkpoint.safetensors_header import TensorEntry, WeightFile
from common.errors import ModelError
from common.observability.start_progress import progressed
from common.observability.start_times import count

THREADS = 8
SLOTS, SLOT_BYTES = 16, 8 << 20  # 128 MiB of pinned memory
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}

Bytes = npt.NDArray[np.uint8]
# A tensor of the file, and the indices of the block of it that is read.
Read = tuple[str, tuple[slice, ...]]


@dataclass(slots=True)
class _Slot:
    """One pinned buffer; its event is recorded after the copy of its content to the GPU."""

    pinned: Tensor
    copied: torch.cuda.Event | None = None
    content: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self.content = self.pinned.numpy()


@dataclass(frozen=True, slots=True)
class _Job:
    """A part that a thread copies into a slot."""

    slot: _Slot
    nbytes: int
    filling: Future[None]


class StagedReads:
    """Reads for one device. A context, since it has threads."""

    def __init__(
        self, device: torch.device, threads: int = THREADS, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._slot_bytes = slot_bytes
        self._waited = 0.0  # seconds in which no part was there to copy
        self._free = deque(
            _Slot(torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=self._pinned)) for _ in range(slots)
        )
        self._threads = ThreadPoolExecutor(
            min(threads, len(os.sched_getaffinity(0))), "weights", self._begin_thread
        )

    def _begin_thread(self) -> None:
        """Make the device current: waiting for an event on another one may open a context on the first GPU."""
        if self._pinned:
            torch.cuda.set_device(self._device)

    def __enter__(self) -> StagedReads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        count("file_waits", self._waited)

    def blocks(self, file: WeightFile, reads: Iterable[Read]) -> Generator[Tensor]:
        """Yield the blocks of `reads`, in their order, as tensors of the file's dtype on the device.

        Copies run on the current stream, on which a block has to be used. Raises ModelError if the file has changed.
        """
        reads = list(reads)
        with opened(file.path) as source:
            found, expected = os.fstat(source.fileno()).st_size, file.data_start + file.num_bytes
            if found != expected:
                raise ModelError(
                    f"{file.path} cannot be read as safetensors: it has {found} bytes instead of {expected}, and has "
                    "changed since its header was read"
                )
            content = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(content, np.uint8)[file.data_start :]
        parts = (
            part
            for name, block in reads
            for part in _parts(_bytes_of(data, file.tensors[name], block), self._slot_bytes)
        )
        jobs: deque[_Job] = deque()  # in the order of their parts
        try:
            for name, block in reads:
                values = self._empty(file.tensors[name], block)
                into = values.view(-1).view(torch.uint8)
                at = 0
                while at < into.numel():
                    while self._free and (part := next(parts, None)) is not None:
                        slot = self._free.popleft()
                        filling = self._threads.submit(_fill, slot, part, content, data)
                        jobs.append(_Job(slot, part.size, filling))
                    at += self._give(jobs.popleft(), into[at:])
                yield values
        finally:
            for job in jobs:
                if not job.filling.cancel():
                    wait([job.filling])
                self._free.append(job.slot)

    def _empty(self, entry: TensorEntry, block: tuple[slice, ...]) -> Tensor:
        shape = [len(range(*cut.indices(size))) for cut, size in zip(block, entry.shape, strict=True)]
        return torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype], device=self._device)

    def _give(self, job: _Job, into: Tensor) -> int:
        """Copy the part of a job to the beginning of `into`, free its slot, and return the number of bytes."""
        slot = job.slot
        try:
            started = time.perf_counter()
            job.filling.result()
            progressed()
            self._waited += time.perf_counter() - started
            into[: job.nbytes].copy_(slot.pinned[: job.nbytes], non_blocking=True)
            if self._pinned:
                slot.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                slot.copied.record()
        finally:
            self._free.append(slot)
        return job.nbytes


def _bytes_of(data: Bytes, entry: TensorEntry, block: tuple[slice, ...]) -> Bytes:
    """Return the block as bytes, without a copy: the last axis has all bytes of its values."""
    found = data[entry.begin : entry.end]
    if not entry.shape or not found.size:
        return found
    size = found.size // int(np.prod(entry.shape))
    found = found.reshape(*entry.shape[:-1], entry.shape[-1] * size)
    begin, end, _ = block[-1].indices(entry.shape[-1])
    return found[(*block[:-1], slice(begin * size, end * size))]


def _parts(values: Bytes, most: int) -> Iterator[Bytes]:
    """Cut a block into parts of at most `most` bytes, which follow one another in row-major order."""
    if values.size <= most:
        if values.size:
            yield values
        return
    rows = most * len(values) // values.size
    if not rows:
        for each in values:
            yield from _parts(each, most)
        return
    for at in range(0, len(values), rows):
        yield values[at : at + rows]


def _fill(slot: _Slot, part: Bytes, content: mmap.mmap, data: Bytes) -> None:
    """Copy a part of the file into a slot once the last copy from it has ended. Runs in a thread."""
    begin = part.ctypes.data - data.ctypes.data + len(content) - data.size
    length = 1 + sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
    page = begin // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError):  # only a hint, for files that are not in memory yet
        content.madvise(mmap.MADV_WILLNEED, page, begin + length - page)
    if slot.copied is not None:
        slot.copied.synchronize()
    np.copyto(slot.content[: part.size].reshape(part.shape), part)
