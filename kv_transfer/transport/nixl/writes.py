"""Parts of nixl writes: peers, running transfers, staging memory for records, and pieces by their numbers."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.transport.base import PeerMemory, Target, Ticket, WriteState
from kv_transfer.transport.cuda.cudart import Mark
from kv_transfer.transport.nixl.agent import MemorySpan, NixlAgent, PostedTransfer, Rows, span_of

_SLOTS: Final = 64  # records in flight before more memory is registered


class Remote(PeerMemory):
    """A peer's two regions."""

    def __init__(self, target: Target, kv: MemorySpan, records: MemorySpan) -> None:
        super().__init__(target)
        self.kv = kv
        self.records = records
        self.pages: tuple[PoolLayout, Any] | None = None  # its layout, and the pool as a prepared list
        self.attached = True
        self.open: list[Write] = []  # writes with running transfers
        self.moved = 0
        self.last_error = ""
        self.faulty = False  # its agent must be added again before the next write


@dataclass(slots=True, eq=False)
class RunningTransfer:
    """A transfer that has not ended."""

    operation: PostedTransfer
    nbytes: int
    failed_at: float | None = None


@dataclass(slots=True, eq=False)
class Write(Ticket):
    peer: Remote
    release: Callable[[], None]  # returns the resources of its transfers
    generation: int = 0  # 0: nothing was posted
    mark: Mark | None = None  # after which the checksums are readable
    parts: list[RunningTransfer] = field(default_factory=list)
    faulty: bool = False
    state: WriteState = WriteState.PENDING


class Staging:
    """Registered host memory from which records are sent: slots of `slot_bytes`, extended when none is free."""

    def __init__(self, agent: NixlAgent, slot_bytes: int) -> None:
        self._agent = agent
        self.slot_bytes = slot_bytes
        self._free: list[tuple[memoryview, MemorySpan]] = []

    def take(self) -> tuple[memoryview, MemorySpan]:
        """Take a slot. Raises ConfigError if no more memory can be registered, OSError if there is none."""
        if not self._free:
            memory = memoryview(mmap.mmap(-1, _SLOTS * self.slot_bytes))
            span = span_of(memory)
            self._agent.register(span)
            for start in range(0, memory.nbytes, self.slot_bytes):
                slot = MemorySpan(span.address + start, self.slot_bytes, 0, "DRAM")
                self._free.append((memory[start : start + self.slot_bytes], slot))
        return self._free.pop()

    def give_back(self, slot: tuple[memoryview, MemorySpan]) -> None:
        self._free.append(slot)


def nothing() -> None:
    """No-op: page writes have no resources to return."""


def failed(peer: Remote, error: Exception) -> Write:
    """Return a failed write of which nothing was posted."""
    peer.last_error = str(error)
    return Write(peer, nothing, state=WriteState.FAILED)


def planes(layout: PoolLayout, span: MemorySpan) -> list[Rows]:
    """Return every page of every plane: page p of plane i is piece i * num_pages + p."""
    return [Rows(span.address + plane.offset, plane.page_bytes, layout.num_pages) for plane in layout.planes]


def numbers(layout: PoolLayout, pages: Sequence[int]) -> NDArray[np.int32]:
    """Return [planes * n] piece numbers for `planes`, plane by plane."""
    first = np.arange(len(layout.planes), dtype=np.int32)[:, None] * layout.num_pages
    found: NDArray[np.int32] = (first + np.array(pages, dtype=np.int32)).ravel()
    return found


def cuts(lengths: NDArray[np.int64], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, bytes) of neighbouring pieces: at most `most` bytes, but at least one piece."""
    ends = np.cumsum(lengths)
    start = sent = 0
    while start < len(ends):
        end = max(start + 1, int(np.searchsorted(ends, sent + most, side="right")))
        yield start, end, int(ends[end - 1]) - sent
        start, sent = end, int(ends[end - 1])
