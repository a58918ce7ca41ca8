"""CUDA IPC, sending side: the peer's pool mapped, one lane per peer, one kernel per write."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from common.errors import HandshakeRefused
from kv_transfer.copy_plan import Copy, copies, runs
from kv_transfer.layout import KvLayout
from kv_transfer.transport import process, shm_segment
from kv_transfer.transport.base import (
    DeviceMemory,
    Memory,
    PageWrite,
    PeerMemory,
    SenderEndpoint,
    Target,
    Ticket,
    WriteState,
)
from kv_transfer.transport.cuda_pages import PagedMemory, move_pages, page_list
from kv_transfer.transport.cudart import CudaError, CudaRuntime, Lane, Mark
from kv_transfer.transport.description import CudaIpcDescription, kind
from kv_transfer.transport.gpu_digests import LaterDigests, to_host
from kv_transfer.transport.page_digest import as_digests

LOCAL_BLOCKS = 264  # same GPU, two per multiprocessor: more gain nothing (tests/bench/transfer.py)
REMOTE_BLOCKS = 128  # another GPU: three times what NVLink takes; the rest of the GPU computes


class _Mapped(PeerMemory):
    """A peer's pool and records, mapped; and the lane on which they are written."""

    def __init__(
        self, target: Target, device: int, address: int, remote: bool, records: mmap.mmap, lane: Lane
    ) -> None:
        super().__init__(target)
        self.device = device  # that the pool was opened for
        self.remote = remote  # the pool is on another GPU than ours
        self.address = address
        self.records_map: mmap.mmap | None = records
        self.records = memoryview(records)
        self.lane = lane
        self.memory: Tensor | None = None  # what kernels of the own GPU can write; None: the driver copies
        self.pages: tuple[KvLayout, PagedMemory] | None = None
        self.moved = 0
        self.open: list[_Posted] = []  # not known to have settled
        self.trouble = ""

    @property
    def attached(self) -> bool:
        return self.records_map is not None


@dataclass(slots=True, eq=False)
class _Posted(Ticket):
    peer: _Mapped
    nbytes: int
    mark: Mark | None  # None once it is settled
    state: WriteState = WriteState.PENDING

    def settle(self, state: WriteState) -> None:
        if self.state is WriteState.PENDING:
            self.state, self.mark = state, None
            self.peer.moved += self.nbytes if state is WriteState.DONE else 0
            if self in self.peer.open:
                self.peer.open.remove(self)


class CudaIpcSender(SenderEndpoint):
    """Writes from a pool on one GPU into pools on GPUs of the same host."""

    def __init__(
        self,
        cuda: CudaRuntime | None = None,
        local_blocks: int = LOCAL_BLOCKS,
        remote_blocks: int = REMOTE_BLOCKS,
    ) -> None:
        self._cuda = cuda or CudaRuntime()
        self._local_blocks = local_blocks
        self._remote_blocks = remote_blocks
        self._peers: list[_Mapped] = []

    def register(self, layout: KvLayout, kv: Memory) -> None:
        if not isinstance(kv, DeviceMemory):
            raise TypeError("the cuda_ipc transport sends pages from a GPU, not from host memory")
        if kv.nbytes < layout.total_bytes:
            raise ValueError(f"the KV buffer has {kv.nbytes} bytes, its layout needs {layout.total_bytes}")
        self.layout = layout
        self._pool = kv
        words = self._cuda.tensor(kv.address, kv.nbytes)
        self._own = words.device
        self._lane = self._cuda.lane(kv.device)
        with self._lane.entered():
            self._source = PagedMemory(layout, words, self._own)
            padding = page_list([0], [0], device=self._own)
            sums = torch.zeros(1, dtype=torch.int64, device=self._own)
            for each in (None, sums):  # page 0 onto itself: compiles now rather than in the first request
                move_pages(self._source, self._source, padding, each, range(len(layout.planes)), 1)
        self._lane.mark().wait()

    def digests(self, pages: Sequence[int]) -> list[int]:
        """Waits for the GPU; `write_pages` does not."""
        with self._lane.entered():
            sums = torch.zeros(len(pages), dtype=torch.int64, device=self._own)
            index = page_list(pages, device=self._own)
            move_pages(self._source, None, index, sums, range(len(self.layout.planes)), self._local_blocks)
            return as_digests(sums.cpu().tolist())

    # ---- peers

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        if not isinstance(description, CudaIpcDescription):
            raise HandshakeRefused(
                f"it takes pages by {kind(description)}, this prefill node sends by cuda_ipc; "
                "set the same transport on both"
            )
        me = process.current()
        if description.owner.host != me.host:
            raise HandshakeRefused(
                "it runs on another host or in another pid namespace, where CUDA IPC does not reach"
            )
        if description.owner == me:
            raise HandshakeRefused("it is this very process: CUDA opens no handle where it was made")
        if not shm_segment.is_of(description.records, description.owner, target.incarnation):
            raise HandshakeRefused(f"{description.records!r} is not the name of a segment that it made")
        records = shm_segment.attach(description.records, target.records_bytes)
        try:
            peer = self._open(target, description, records)
        except HandshakeRefused:
            records.close()
            raise
        self._peers.append(peer)
        return peer

    def _open(self, target: Target, description: CudaIpcDescription, records: mmap.mmap) -> _Mapped:
        """Map the pool for the own GPU where it reaches the other, else for that one and let the driver copy."""
        own = self._pool.device
        theirs = self._cuda.find(description.device)
        direct = theirs is None or self._cuda.reaches(own, theirs)
        device = own if direct or theirs is None else theirs
        try:
            address = self._cuda.open(device, description.handle)
        except CudaError as error:
            hint = "" if theirs is not None else "; its GPU is not visible here (CUDA_VISIBLE_DEVICES)"
            raise HandshakeRefused(f"its GPU memory cannot be opened ({error}{hint})") from None
        found = self._cuda.span(address)
        if found < target.kv_bytes:
            self._cuda.close(device, address)
            raise HandshakeRefused(f"its GPU memory has {found} bytes, its layout needs {target.kv_bytes}")
        peer = _Mapped(target, device, address, theirs != own, records, self._cuda.lane(own))
        if direct:
            peer.memory = self._cuda.tensor(address, target.kv_bytes)
        return peer

    def detach(self, peer: PeerMemory) -> None:
        """Waits for what is being written: microseconds, as a write is one kernel."""
        assert isinstance(peer, _Mapped)
        if not peer.attached:
            return
        for posted in list(peer.open):
            self._wait(posted)
        peer.memory = peer.pages = None
        peer.records.release()
        assert peer.records_map is not None
        peer.records_map.close()
        peer.records_map = None
        self._peers.remove(peer)
        try:
            self._cuda.close(peer.device, peer.address)
        except CudaError as error:  # a mapping that cannot be undone hurts nobody
            peer.trouble = str(error)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)

    # ---- writes

    def write_pages(
        self,
        peer: PeerMemory,
        dst: KvLayout,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        generation: int,
        checksums: bool,
        planes: range | None = None,
        after: Any = None,
    ) -> PageWrite:
        """One kernel; returns when it is launched.

        Args:
            planes: a part of them, for sending layer by layer; checksums are then of these alone, and those
                of all parts add up modulo 2^64.
            after: torch.cuda.Event that the source is complete at; None: it is complete now. (Waiting for
                whatever the computing stream has been given would wait for the next forward as well.)
        """
        assert isinstance(peer, _Mapped)
        chosen = planes if planes is not None else range(len(self.layout.planes))
        nbytes = len(src_pages) * sum(self.layout.planes[plane].page_bytes for plane in chosen)
        if not peer.attached:
            return PageWrite(_Posted(peer, nbytes, None, WriteState.FAILED), nbytes)
        try:
            with peer.lane.entered():
                if after is not None:
                    peer.lane.wait_for(after)
                sums = self._launch(peer, dst, src_pages, dst_pages, checksums, chosen)
            ticket = self._posted(peer, nbytes)
        except RuntimeError as error:
            return PageWrite(self._failed(peer, nbytes, error), nbytes)
        return PageWrite(ticket, nbytes, () if sums is None else LaterDigests(sums))

    def _launch(
        self,
        peer: _Mapped,
        dst: KvLayout,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        checksums: bool,
        planes: range,
    ) -> Tensor | None:
        """On the lane of the peer. Returns the checksums, on their way to the host."""
        index = page_list(src_pages, dst_pages, device=self._own)
        sums = torch.zeros(len(src_pages), dtype=torch.int64, device=self._own) if checksums else None
        into = self._view(peer, dst)
        if into is not None:
            blocks = self._remote_blocks if peer.remote else self._local_blocks
            move_pages(self._source, into, index, sums, planes, blocks)
        else:
            if sums is not None:
                move_pages(self._source, None, index, sums, planes, self._local_blocks)
            for copy in copies(_only(self.layout, planes), _only(dst, planes), runs(src_pages, dst_pages)):
                self._cuda.copy(
                    peer.address + copy.dst, self._pool.address + copy.src, copy.length, peer.lane
                )
        return None if sums is None else to_host(sums)

    def _view(self, peer: _Mapped, dst: KvLayout) -> PagedMemory | None:
        """The peer's pool by its layout; made once, as a peer has one layout for its life."""
        if peer.memory is None:
            return None
        if peer.pages is None or peer.pages[0] != dst:
            peer.pages = (dst, PagedMemory(dst, peer.memory, self._own))
        return peer.pages[1]

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        """Copies of any shape, one call of the driver for each: `write_pages` is the fast way."""
        assert isinstance(peer, _Mapped)
        nbytes = sum(copy.length for copy in copies)
        if not peer.attached:
            return _Posted(peer, nbytes, None, WriteState.FAILED)
        try:
            for copy in copies:
                self._cuda.copy(
                    peer.address + copy.dst, self._pool.address + copy.src, copy.length, peer.lane
                )
            return self._posted(peer, nbytes)
        except RuntimeError as error:
            return self._failed(peer, nbytes, error)

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, _Mapped)
        if not peer.attached:
            return _Posted(peer, len(data), None, WriteState.FAILED)
        peer.records[offset : offset + len(data)] = data
        peer.moved += len(data)
        return _Posted(peer, len(data), None, WriteState.DONE)

    def _posted(self, peer: _Mapped, nbytes: int) -> _Posted:
        posted = _Posted(peer, nbytes, peer.lane.mark())
        peer.open.append(posted)
        return posted

    def _failed(self, peer: _Mapped, nbytes: int, error: RuntimeError) -> _Posted:
        """A launch failed half way: what was launched before it must settle first."""
        peer.trouble = str(error)
        posted = _Posted(peer, nbytes, None)
        try:
            peer.lane.mark().wait()
        except RuntimeError as fatal:  # the GPU itself has failed: nothing runs on it any more
            peer.trouble = f"{error}; {fatal}"
        posted.settle(WriteState.FAILED)
        return posted

    # ---- completion

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, _Posted)
        if ticket.mark is not None:
            try:
                if ticket.mark.ready():
                    ticket.settle(WriteState.DONE)
            except RuntimeError as error:
                ticket.peer.trouble = str(error)
                ticket.settle(WriteState.FAILED)
        return ticket.state

    def _wait(self, posted: _Posted) -> None:
        try:
            if posted.mark is not None:
                posted.mark.wait()
            posted.settle(WriteState.DONE)
        except RuntimeError as error:
            posted.peer.trouble = str(error)
            posted.settle(WriteState.FAILED)

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, _Mapped)
        for posted in list(peer.open):
            self.poll(posted)
        return peer.moved

    def trouble(self, peer: PeerMemory) -> str:
        assert isinstance(peer, _Mapped)
        return peer.trouble


def _only(layout: KvLayout, planes: range) -> KvLayout:
    if len(planes) == len(layout.planes):
        return layout
    return msgspec.structs.replace(layout, planes=layout.planes[planes.start : planes.stop])
