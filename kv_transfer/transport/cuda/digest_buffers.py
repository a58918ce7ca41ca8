"""Memory for the checksums of an arrived prompt, reused for later prompts to keep the work per request small.

One copy brings the page ids and the zeroed sums to the device, and another one brings the sums back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kv_transfer.transport.cuda.later_digests import LaterDigests
from kv_transfer.transport.page_digest import as_digests

# More comparisons at a time, and prompts of more pages, get buffers of their own.
_KEPT: Final = 8
_MAX_PAGES: Final = 1024
_IN_ADVANCE: Final = 2
# Words that precede the checksums of pages: the checksum of the state, and one that keeps those of pages aligned.
_STATE: Final = 2


class DigestBuffer:
    """Host and device memory for the checksums of up to `capacity` pages and one state slot.

    Kernels are compiled for the alignment of their arguments, so every part begins at a multiple of 16 bytes.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        """Allocate on the current stream, on which all later work must run. `capacity`: a multiple of 4."""
        pinned = device.type == "cuda"
        sums = _STATE + capacity
        words = sums + _STATE + capacity // 2
        self.capacity = capacity
        # [words] int64: zeros for the sums, then ids as int32: the slot, three unused, and the pages.
        self._staged = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        self._on_device = torch.zeros(words, dtype=torch.int64, device=device)
        self._landing = torch.zeros(sums, dtype=torch.int64, pin_memory=pinned)
        self._ids = self._staged[sums:].view(torch.int32).numpy()
        self._sums = self._on_device[:sums]
        ids = self._on_device[sums:].view(torch.int32)[None]
        self._slot, self._pages = ids[:, :1], ids[:, 2 * _STATE :]
        self._slot_sum, self._page_sums = self._sums[:1], self._sums[_STATE:]

    def load(self, pages: Sequence[int], slot: int) -> None:
        """Start to copy ids to the device, and zeros to the sums. The previous sums must have been read."""
        self._ids[0] = slot
        self._ids[2 * _STATE : 2 * _STATE + len(pages)] = pages
        self._on_device.copy_(self._staged, non_blocking=True)

    def pages(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids [1, count] int32 and the sums [count] int64 of pages, on the device."""
        return self._pages[:, :count], self._page_sums[:count]

    def state(self) -> tuple[Tensor, Tensor]:
        """Return the id [1, 1] int32 and the sum [1] int64 of the state slot, on the device."""
        return self._slot, self._slot_sum

    def land(self) -> None:
        """Start to copy the sums to the host."""
        self._landing.copy_(self._sums, non_blocking=True)

    def landed(self, count: int, state: bool) -> list[int]:
        """Return the checksums of `count` pages, then the one of the state if there is a `state`."""
        sums: list[int] = self._landing[: _STATE + count].tolist()
        return as_digests(sums[_STATE:] + sums[: int(state)])


class DigestBuffers:
    """The buffers of one pool that are not in use. Used from one thread, on one lane."""

    def __init__(self, num_pages: int, device: torch.device) -> None:
        """Make the first buffers, on the current stream. `num_pages`: of the pool."""
        self._device = device
        self._capacity = -(-min(num_pages, _MAX_PAGES) // 4) * 4
        self._free = [DigestBuffer(self._capacity, device) for _ in range(_IN_ADVANCE)]

    def __len__(self) -> int:
        return len(self._free)

    def take(self, pages: int) -> DigestBuffer:
        """Return a buffer for this number of pages that nothing else uses. Raises MemoryError."""
        if self._free and pages <= self._capacity:
            return self._free.pop()
        try:
            return DigestBuffer(max(self._capacity, -(-pages // 4) * 4), self._device)
        except RuntimeError as error:
            # A GPU that has failed fails again at whatever comes next.
            raise MemoryError(f"no memory for the checksums of {pages} pages: {error}") from error

    def give_back(self, buffer: DigestBuffer) -> None:
        """Take back a buffer whose sums were read."""
        if buffer.capacity == self._capacity and len(self._free) < _KEPT:
            self._free.append(buffer)


class BufferedDigests(LaterDigests):
    """Checksums in a buffer, which is given back when they are read.

    If they are never read, the buffer is not reused: torch frees its memory once the device no longer uses it.
    """

    def __init__(self, buffers: DigestBuffers, buffer: DigestBuffer, pages: int, state: bool) -> None:
        self._buffers = buffers
        self._buffer: DigestBuffer | None = buffer
        self._pages = pages
        self._state = state
        self._values: list[int] = []

    def __len__(self) -> int:
        return self._pages + self._state

    def values(self) -> list[int]:
        if self._buffer is not None:
            self._values = self._buffer.landed(self._pages, self._state)
            self._buffers.give_back(self._buffer)
            self._buffer = None
        return self._values
