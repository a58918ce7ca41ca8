"""Launches that write pages into a peer's pool over CUDA IPC, on the peer's lanes, and their tickets."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.copy_plan import Copy, copies, runs, single_rows, state_copies
from kv_transfer.pair_plan import PairPlan, RowsPair
from kv_transfer.transport.base import DeviceMemory, PeerMemory, Target, Ticket, WriteState
from kv_transfer.transport.cuda.blocks import move_parts, words
from kv_transfer.transport.cuda.cudart import CudaRuntime, Lane, Mark
from kv_transfer.transport.cuda.later_digests import to_host
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages, page_list


class Mapped(PeerMemory):
    """The mapped pool and records of a peer, and the lanes on which they are written."""

    def __init__(
        self,
        target: Target,
        device: int | None,
        address: int,
        remote: bool,
        records: mmap.mmap,
        lane: Lane,
        layers: Lane,
    ) -> None:
        super().__init__(target)
        self.device = device  # for which the pool was opened; None for a pool of this process
        self.remote = remote  # the pool is on another GPU than this node's
        self.address = address
        self.records_map: mmap.mmap | None = records
        self.records = memoryview(records)
        self.lane = lane  # for complete pages
        self.layers = layers  # for copies that wait for a forward: nothing else may queue after them
        # The pool, if kernels of this rank's GPU can write it; None: the driver copies.
        self.memory: Tensor | None = None
        self.pages: tuple[PoolLayout, PagedMemory] | None = None
        self.moved = 0
        self.open: list[LaneTicket] = []  # tickets that may not have settled
        self.last_error = ""

    @property
    def attached(self) -> bool:
        return self.records_map is not None


@dataclass(slots=True, eq=False)
class LaneTicket(Ticket):
    peer: Mapped
    nbytes: int
    mark: Mark | None  # None once it is settled
    state: WriteState = WriteState.PENDING
    fault: str = ""  # a launch failed; earlier launches still have to settle
    keep: object = None  # keeps memory of another lane alive until the ticket settles

    @classmethod
    def on(cls, peer: Mapped, lane: Lane, nbytes: int, fault: str = "", keep: object = None) -> LaneTicket:
        """Return a ticket for all launches so far on this lane. Raises RuntimeError if the GPU has failed."""
        posted = cls(peer, nbytes, lane.mark(), fault=fault, keep=keep)
        peer.open.append(posted)
        return posted

    @classmethod
    def settled(cls, peer: Mapped, nbytes: int, state: WriteState) -> LaneTicket:
        """Return a ticket that is already settled."""
        return cls(peer, nbytes, None, state)

    @classmethod
    def failed(cls, peer: Mapped, lane: Lane, nbytes: int, fault: str, keep: object = None) -> LaneTicket:
        """Return a ticket for a launch on that lane that failed halfway."""
        peer.last_error = fault
        try:
            return cls.on(peer, lane, nbytes, fault, keep)
        # The GPU itself has failed: nothing runs on it any longer.
        except RuntimeError as fatal:
            peer.last_error = f"{fault}; {fatal}"
            return cls.settled(peer, nbytes, WriteState.FAILED)

    def poll(self, wait: bool = False) -> WriteState:
        """Settle the ticket if it can be settled and return its state; with `wait`, wait until it can."""
        if self.mark is None:
            return self.state
        try:
            if wait:
                self.mark.wait()
            elif not self.mark.ready():
                return self.state
            self._settle(WriteState.FAILED if self.fault else WriteState.DONE)
        except RuntimeError as error:
            self.fault = self.fault or str(error)
            self._settle(WriteState.FAILED)
        return self.state

    def _settle(self, state: WriteState) -> None:
        self.state, self.mark, self.keep = state, None, None
        self.peer.last_error = self.fault or self.peer.last_error
        self.peer.moved += self.nbytes if state is WriteState.DONE else 0
        self.peer.open.remove(self)


@dataclass(slots=True)
class PageWriter:
    """Writes from this rank's pool into peers' pools.

    `source` is this rank's pool as kernels address it; `local_blocks` and `remote_blocks` are max_blocks of move_pages.
    """

    cuda: CudaRuntime
    layout: PoolLayout
    pool: DeviceMemory
    memory: Tensor  # this rank's pool as flat uint8
    source: PagedMemory
    local_blocks: int
    remote_blocks: int

    @property
    def device(self) -> torch.device:
        return self.source.words.device

    def page_list(self, *pages: Sequence[int]) -> Tensor:
        return page_list(*pages, device=self.device)

    def no_sums(self, count: int) -> Tensor:
        """Return [count] zeroed int64, to which checksums are added."""
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def launch(
        self,
        peer: Mapped,
        lane: Lane,
        plan: PairPlan,
        pages: tuple[Sequence[int], Sequence[int]],
        index: Tensor,
        sums: Tensor | None,
        planes: range,
    ) -> None:
        """Launch on this lane, which is entered. `index` is `page_list(*pages)`; checksums are added to `sums`."""
        if not plan.whole:
            self._launch_parts(peer, lane, plan, pages, index, sums, planes)
            return
        into = self.view(peer, plan.dst.layout)
        if into is not None:
            blocks = self.remote_blocks if peer.remote else self.local_blocks
            move_pages(self.source, into, index, sums, planes, blocks)
            return
        if sums is not None:
            move_pages(self.source, None, index, sums, planes, self.local_blocks)
        self.copy(peer, lane, copies(plan, runs(*pages), slice(planes.start, planes.stop)))

    def copy(self, peer: Mapped, lane: Lane, wanted: Iterable[Copy]) -> None:
        """Execute copies of any shape, one driver call per row."""
        for row in single_rows(wanted):
            self.cuda.copy(peer.address + row.dst, self.pool.address + row.src, row.length, lane)

    @torch.inference_mode()
    def write_state(
        self, peer: Mapped, plan: PairPlan, slots: tuple[int, int], checksums: bool
    ) -> Tensor | None:
        """Copy the state of one request on the peer's lane, which is entered.

        Returns [1] its checksum, which is being copied to the host.
        """
        index = self.page_list([slots[0]], [slots[1]])
        sums = self.no_sums(1) if checksums else None
        if not self._move_parts(peer, plan.state, index, sums):
            self.copy(peer, peer.lane, state_copies(plan, *slots))
        return None if sums is None else to_host(sums)

    def _launch_parts(
        self,
        peer: Mapped,
        lane: Lane,
        plan: PairPlan,
        pages: tuple[Sequence[int], Sequence[int]],
        index: Tensor,
        sums: Tensor | None,
        planes: range,
    ) -> None:
        """Launch like `launch`, if the two ranks hold different heads."""
        parts = [part for plane in plan.planes[planes.start : planes.stop] for part in plane]
        before = [part.src for plane in plan.planes[: planes.start] for part in plane]
        if not self._move_parts(peer, parts, index, sums, words(before)):
            self.copy(peer, lane, copies(plan, runs(*pages), slice(planes.start, planes.stop)))

    def _move_parts(
        self, peer: Mapped, parts: Sequence[RowsPair], index: Tensor, sums: Tensor | None, first: int = 0
    ) -> bool:
        """Add checksums of parts to `sums` and copy them; return whether they are copied, or the driver has to."""
        direct = peer.memory is not None
        if direct or sums is not None:
            blocks = self.remote_blocks if direct and peer.remote else self.local_blocks
            move_parts(self.memory, peer.memory, parts, index, sums, blocks, first)
        return direct

    def view(self, peer: Mapped, dst: PoolLayout) -> PagedMemory | None:
        """Return the peer's pool by its layout; None if the driver copies.

        It is made once, which waits for the current stream.
        """
        if peer.memory is None:
            return None
        if peer.pages is None or peer.pages[0] is not dst:
            peer.pages = (dst, PagedMemory(dst, peer.memory, self.device))
        return peer.pages[1]
