"""The sending side of CUDA IPC: maps the peer's pool, two lanes per peer, one kernel per write or per layer."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

from common.errors import HandshakeRefused
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.copy_plan import Copy
from kv_transfer.pair_plan import PairPlan
from kv_transfer.transport.base import (
    DeviceMemory,
    Memory,
    PageList,
    PageWrite,
    PeerMemory,
    SenderSetup,
    Target,
    Ticket,
    WriteState,
    check_size,
)
from kv_transfer.transport.cuda.blocks import compile_moves
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.digests import GpuDigests
from kv_transfer.transport.cuda.later_digests import LandingDigests
from kv_transfer.transport.cuda.pages import PagedMemory, move_pages
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription
from kv_transfer.transport.cuda_ipc.layers import CudaLayers
from kv_transfer.transport.cuda_ipc.writes import LaneTicket, Mapped, PageWriter
from kv_transfer.transport.layers import LayerEndpoint, LayerWrite
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.segment import attach_owned

LOCAL_BLOCKS = 264  # same GPU, two per multiprocessor: more gain nothing (tests/bench/transfer.py)
REMOTE_BLOCKS = 128  # another GPU: three times what NVLink needs; the rest of the GPU computes


class CudaIpcSender(LayerEndpoint):
    """Writes from a pool on one GPU into pools on GPUs of the same host."""

    takes = CudaIpcDescription
    waits_for_stream = True

    def __init__(
        self,
        cuda: CudaRuntime | None = None,
        local_blocks: int = LOCAL_BLOCKS,
        remote_blocks: int = REMOTE_BLOCKS,
    ) -> None:
        self._cuda = cuda or CudaRuntime()
        self._blocks = local_blocks, remote_blocks
        self._peers: list[Mapped] = []

    def register(self, layout: PoolLayout, kv: Memory) -> None:
        if not isinstance(kv, DeviceMemory):
            raise TypeError("the cuda_ipc transport sends pages from a GPU, not from host memory")
        check_size("buffer", kv, layout)
        self.layout = layout
        self._pool = kv
        words = self._cuda.tensor(kv.address, kv.nbytes)
        self._lane = self._cuda.lane(kv.device)
        with self._lane.entered():
            source = PagedMemory(layout, words, words.device)
            self.writer = PageWriter(self._cuda, layout, kv, words, source, *self._blocks)
            padding, sums = self.writer.page_list([0], [0]), self.writer.no_sums(1)
            # Page 0 onto itself: this compiles the kernels now instead of in the first request.
            for each in (None, sums):
                move_pages(source, source, padding, each, range(len(layout.planes)), 1)
            compile_moves(words, layout)
        self._lane.mark().wait()
        self.digests = GpuDigests(self._cuda, kv, layout)

    # ---- peers

    def attach(self, target: Target) -> PeerMemory:
        """Open the peer's memory, as any endpoint. Raises RuntimeError if this rank's own GPU has failed."""
        description = target.description
        assert isinstance(description, CudaIpcDescription)
        me = process.current()
        if description.owner.host != me.host:
            raise HandshakeRefused(
                "it runs on another host or in another pid namespace, which CUDA IPC does not cross"
            )
        records = attach_owned(
            description.records, description.owner, target.incarnation, target.records_bytes
        )
        try:
            own = description.owner == me
            peer = (self._own if own else self._open)(target, description, records)
        except HandshakeRefused:
            records.close()
            raise
        except RuntimeError as error:
            records.close()
            # Nothing is queued there, so this returns at once.
            self._lane.mark().wait()
            raise HandshakeRefused(f"its GPU memory cannot be used ({error})") from error
        self._peers.append(peer)
        return peer

    def _own(self, target: Target, description: CudaIpcDescription, records: mmap.mmap) -> Mapped:
        """Use a pool of this process, which needs no mapping: that of the other half of a movable node."""
        address = self._cuda.exported(description.handle)
        if address is None:
            raise HandshakeRefused("it claims to be this process, which has not made this handle")
        self._check_size(address, target)
        lanes = self._cuda.lane(self._pool.device), self._cuda.lane(self._pool.device)
        memory = self._cuda.tensor(address, target.kv_bytes)
        peer = Mapped(target, None, address, False, records, *lanes)
        peer.memory = memory
        return peer

    def _open(self, target: Target, description: CudaIpcDescription, records: mmap.mmap) -> Mapped:
        """Map the pool for this GPU if it can access the other one, else for the other one and let the driver copy."""
        own = self._pool.device
        theirs = self._cuda.find(description.device)
        direct = theirs is None or self._cuda.reaches(own, theirs)
        device = own if direct or theirs is None else theirs
        try:
            address = self._cuda.open(device, description.handle)
        except CudaError as error:
            hint = "" if theirs is not None else "; its GPU is not visible here (CUDA_VISIBLE_DEVICES)"
            raise HandshakeRefused(f"its GPU memory cannot be opened ({error}{hint})") from None
        try:
            self._check_size(address, target)
            lanes = self._cuda.lane(own), self._cuda.lane(own)
            memory = self._cuda.tensor(address, target.kv_bytes) if direct else None
        except (HandshakeRefused, RuntimeError):
            # A mapping that cannot be removed does no harm.
            with contextlib.suppress(CudaError):
                self._cuda.close(device, address)
            raise
        peer = Mapped(target, device, address, theirs != own, records, *lanes)
        peer.memory = memory
        return peer

    def _check_size(self, address: int, target: Target) -> None:
        found = self._cuda.span(address)
        if found < target.kv_bytes:
            raise HandshakeRefused(f"its GPU memory has {found} bytes, its layout needs {target.kv_bytes}")

    def detach(self, peer: PeerMemory) -> None:
        """Wait for unfinished writes, which takes microseconds, or as long as the forward whose layers are being
        sent.
        """
        assert isinstance(peer, Mapped)
        if not peer.attached:
            return
        for posted in list(peer.open):
            posted.poll(wait=True)
        try:
            peer.layers.mark().wait()  # layers of a forward that is being launched have no ticket yet
        except RuntimeError as error:
            peer.last_error = str(error)
        peer.memory = peer.pages = None
        peer.records.release()
        assert peer.records_map is not None
        peer.records_map.close()
        peer.records_map = None
        self._peers.remove(peer)
        if peer.device is None:
            return
        try:
            self._cuda.close(peer.device, peer.address)
        # A mapping that cannot be removed does no harm.
        except CudaError as error:
            peer.last_error = str(error)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)

    # ---- writes

    def write_layers(
        self, peer: PeerMemory, plan: PairPlan, lists: Sequence[PageList], checksums: bool
    ) -> LayerWrite:
        """Prepare the write. For complete pages (`write_pages`), `rest` is one kernel on the peer's lane for these."""
        assert isinstance(peer, Mapped)
        return CudaLayers(self.writer, peer, plan, lists, checksums)

    def write_state(
        self, peer: PeerMemory, plan: PairPlan, slots: tuple[int, int], generation: int, checksums: bool
    ) -> PageWrite:
        """Launch the copy of the state."""
        assert isinstance(peer, Mapped)
        if not peer.attached:
            return PageWrite(LaneTicket.settled(peer, plan.state_bytes, WriteState.FAILED), plan.state_bytes)
        try:
            with peer.lane.entered():
                sums = self.writer.write_state(peer, plan, slots, checksums)
            ticket = LaneTicket.on(peer, peer.lane, plan.state_bytes)
        except RuntimeError as error:
            failed = LaneTicket.failed(peer, peer.lane, plan.state_bytes, str(error))
            return PageWrite(failed, plan.state_bytes)
        return PageWrite(ticket, plan.state_bytes, () if sums is None else LandingDigests(sums))

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        """Execute copies of any shape, one driver call per row; `write_pages` is the fast path."""
        assert isinstance(peer, Mapped)
        nbytes = sum(copy.nbytes for copy in copies)
        if not peer.attached:
            return LaneTicket.settled(peer, nbytes, WriteState.FAILED)
        try:
            self.writer.copy(peer, peer.lane, copies)
            return LaneTicket.on(peer, peer.lane, nbytes)
        except RuntimeError as error:
            return LaneTicket.failed(peer, peer.lane, nbytes, str(error))

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, Mapped)
        if not peer.attached:
            return LaneTicket.settled(peer, len(data), WriteState.FAILED)
        peer.records[offset : offset + len(data)] = data
        peer.moved += len(data)
        return LaneTicket.settled(peer, len(data), WriteState.DONE)

    # ---- completion

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, LaneTicket)
        return ticket.poll()

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, Mapped)
        for posted in list(peer.open):
            posted.poll()
        return peer.moved

    def last_error(self, peer: PeerMemory) -> str:
        assert isinstance(peer, Mapped)
        return peer.last_error


def make_sender(setup: SenderSetup[object]) -> CudaIpcSender:
    return CudaIpcSender()
