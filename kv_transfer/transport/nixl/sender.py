"""The sending side of NIXL: own and peer pages are prepared lists; a write names their pieces by number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, HandshakeRefused
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.copy_plan import Copy, single_rows
from kv_transfer.limits import TransferLimits
from kv_transfer.pair_plan import PairPlan
from kv_transfer.transport.base import (
    Memory,
    PageList,
    PageWrite,
    PeerMemory,
    SenderEndpoint,
    SenderSetup,
    Target,
    Ticket,
    WriteState,
    check_size,
)
from kv_transfer.transport.cuda.cudart import CudaRuntime, Mark
from kv_transfer.transport.cuda.digests import GpuDigests
from kv_transfer.transport.nixl.agent import MemorySpan, NixlAgent, NixlError, ProgressThread, Rows, span_of
from kv_transfer.transport.nixl.kind import NixlDescription, NixlOptions
from kv_transfer.transport.nixl.liveness import LivenessConnections
from kv_transfer.transport.nixl.writes import (
    Remote,
    RunningTransfer,
    Staging,
    Write,
    cuts,
    failed,
    nothing,
    numbers,
    planes,
)

SETTLE_SECONDS: Final = 2.0  # seconds after a fault during which pieces may still land at the same peer
CLOSE_SECONDS: Final = 1.0


class NixlSender(SenderEndpoint):
    """Sends from one thread; `incarnation` names the agent, `devices` is what UCX may use."""

    takes = NixlDescription

    def __init__(
        self,
        incarnation: str,
        devices: str,
        limits: TransferLimits,
        *,
        cuda: CudaRuntime | None = None,
        library: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start NIXL. Raises ConfigError if NIXL is not installed or does not start on these network `devices`."""
        self._agent = NixlAgent(incarnation, devices, library)
        self._limits = limits
        self._cuda = cuda
        self._clock = clock
        self._liveness = LivenessConnections()
        self._peers: list[Remote] = []  # attached, or with transfers that have not ended
        self._gpu: GpuDigests | None = None
        self._progress: ProgressThread | None = None

    def register(self, layout: PoolLayout, kv: Memory) -> None:
        if isinstance(kv, memoryview):
            super().register(layout, kv)
            device = None
        else:
            check_size("buffer", kv, layout)
            self.layout, device = layout, kv.device
            self.digests = self._gpu = GpuDigests(self._cuda or CudaRuntime(), kv, layout)
        self._block = span_of(kv)
        self._agent.register(self._block)
        self._own = self._agent.prepare("", planes(layout, self._block), self._block)
        self._staging = Staging(self._agent, self._limits.record_bytes)
        self._staging.give_back(self._staging.take())
        self._progress = ProgressThread(self._agent.progress, device)

    # ---- peers

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        assert isinstance(description, NixlDescription)
        if (description.device >= 0) != (self._block.kind == "VRAM"):
            raise HandshakeRefused("its pages are on a CPU and this node's on a GPU, or the other way round")
        if not self.writes_ended(target.incarnation):
            raise HandshakeRefused("earlier writes to it have not ended yet")
        peer = Remote(
            target,
            MemorySpan(description.kv, target.kv_bytes, max(0, description.device), self._block.kind),
            MemorySpan(description.records, target.records_bytes, 0, "DRAM"),
        )
        self._liveness.hold(description.liveness)
        self._add_agent(peer)
        self._peers.append(peer)
        return peer

    def _add_agent(self, peer: Remote) -> None:
        """Add the peer's agent. Raises HandshakeRefused if its metadata does not contain the memory it describes."""
        assert isinstance(peer.target.description, NixlDescription)
        name = peer.target.incarnation
        try:
            owner = self._agent.add(peer.target.description.metadata)
        except NixlError as error:
            raise HandshakeRefused(
                f"NIXL cannot reach it ({error}): transfer.nixl_devices of both must name one network"
            ) from None
        try:
            if owner != name:
                raise NixlError(f"the metadata belongs to agent {owner[:64]!r}")
            for span in (peer.kv, peer.records):
                rows = [Rows(span.address, span.nbytes, 1)]
                self._agent.forget(self._agent.prepare(name, rows, span))
        except NixlError as error:
            if all(each.target.incarnation != owner for each in self._peers):
                self._agent.remove(owner)
            raise HandshakeRefused(f"its memory is not what it registered with NIXL ({error})") from None
        self._agent.connect(name)

    def writes_ended(self, incarnation: str, generation: int | None = None) -> bool:
        """Return False while transfers to this peer run: any if it is detached, else those of this generation."""
        self._collect()
        theirs = [peer for peer in self._peers if peer.target.incarnation == incarnation]
        if generation is None:
            return all(peer.attached for peer in theirs)
        return all(write.generation != generation for peer in theirs for write in peer.open)

    def detach(self, peer: PeerMemory) -> None:
        """Fail its tickets. NIXL cannot stop a transfer, so `writes_ended` says when the last one has ended."""
        assert isinstance(peer, Remote)
        if not peer.attached:
            return
        peer.attached = False
        self._collect()
        for write in peer.open:
            write.state = WriteState.FAILED

    @property
    def busy(self) -> bool:
        """True while somebody waits for transfers, so that UCX is driven often."""
        return self._progress is not None and self._progress.is_busy

    def close(self) -> None:
        """Wait briefly for running transfers; those that have not ended by then end with the process."""
        for peer in list(self._peers):
            self.detach(peer)
        until = time.monotonic() + CLOSE_SECONDS
        while self._peers and time.monotonic() < until:
            time.sleep(0.001)
            self._collect()
        if self._peers:
            return
        if self._progress is not None:
            self._progress.close()
            self._progress = None
            self._agent.forget(self._own)
        self._agent.close()
        self._liveness.close()

    # ---- writes

    def write_pages(self, peer: PeerMemory, plan: PairPlan, pages: PageList, checksums: bool) -> PageWrite:
        assert isinstance(peer, Remote)
        if not plan.whole:
            return super().write_pages(peer, plan, pages, checksums)
        src_pages = pages.src_pages
        dst, nbytes = plan.dst.layout, len(src_pages) * plan.page_bytes
        if not src_pages:
            return PageWrite(Write(peer, nothing, state=WriteState.DONE), 0)
        mark: Mark | None = None
        digests: Sequence[int] = ()
        try:
            self._use(peer)
            if peer.pages is None or peer.pages[0] is not dst:
                name = peer.target.incarnation
                peer.pages = (dst, self._agent.prepare(name, planes(dst, peer.kv), peer.kv))
            if checksums and self._gpu is not None:
                digests, mark = self._gpu.beside(plan.src, src_pages)
            elif checksums:
                digests = self.page_digests(plan.src, src_pages)
        except (NixlError, HandshakeRefused, RuntimeError) as error:
            return PageWrite(failed(peer, error), nbytes)
        ours, theirs = numbers(self.layout, src_pages), numbers(dst, pages.dst_pages)
        sizes = [plane.page_bytes for plane in self.layout.planes]
        lengths = np.repeat(np.array(sizes, dtype=np.int64), len(src_pages))
        write = Write(peer, nothing, pages.generation, mark)
        self._post(write, (self._own, ours), (peer.pages[1], theirs), lengths)
        return PageWrite(write, nbytes, digests)

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        """Execute copies of any shape; `write_pages` is the fast path."""
        assert isinstance(peer, Remote)
        write = Write(peer, nothing, generation)
        return self._write(write, self._block, peer.kv, list(single_rows(copies)))

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, Remote)
        if len(data) > self._staging.slot_bytes:
            return failed(peer, NixlError(f"a record of {len(data)} bytes; set the same limits on both"))
        try:
            slot = self._staging.take()
        except (ConfigError, OSError) as error:
            return failed(peer, error)
        view, span = slot
        view[: len(data)] = data
        write = Write(peer, lambda: self._staging.give_back(slot), generation)
        return self._write(write, span, peer.records, [Copy(0, offset, len(data))])

    def _write(self, write: Write, ours: MemorySpan, theirs: MemorySpan, copies: Sequence[Copy]) -> Ticket:
        """Post `copies` of `ours` to `theirs` as `write`, and return it or a failed write."""
        peer, release = write.peer, write.release
        prepared: list[Any] = []

        def forget() -> None:
            for each in prepared:
                self._agent.forget(each)
            release()

        if not copies:
            return Write(peer, nothing, state=WriteState.DONE)
        write.release = forget
        try:
            self._use(peer)
            rows = [Rows(ours.address + copy.src, copy.length, 1) for copy in copies]
            prepared.append(self._agent.prepare("", rows, ours))
            rows = [Rows(theirs.address + copy.dst, copy.length, 1) for copy in copies]
            prepared.append(self._agent.prepare(peer.target.incarnation, rows, theirs))
        except (NixlError, HandshakeRefused) as error:
            forget()
            return failed(peer, error)
        order = np.arange(len(copies), dtype=np.int32)
        lengths = np.array([copy.length for copy in copies], dtype=np.int64)
        self._post(write, (prepared[0], order), (prepared[1], order), lengths)
        return write

    def _use(self, peer: Remote) -> None:
        """Check that the peer can be written to; after a fault, add its agent again.

        Raises NixlError, HandshakeRefused.
        """
        if not peer.attached:
            raise NixlError("the peer is detached")
        if not peer.faulty:
            return
        self._collect()
        if peer.open:
            raise NixlError(peer.last_error)  # writes from before the fault have not ended
        self._remove_agent(peer)
        self._add_agent(peer)
        peer.faulty = False

    def _post(
        self,
        write: Write,
        ours: tuple[Any, NDArray[np.int32]],
        theirs: tuple[Any, NDArray[np.int32]],
        lengths: NDArray[np.int64],
    ) -> None:
        """Post transfers of at most max_inflight_bytes or one piece, each of which counts as progress when it lands."""
        write.peer.open.append(write)
        for start, end, nbytes in cuts(lengths, self._limits.max_inflight_bytes):
            try:
                operation = self._agent.write(ours[0], ours[1][start:end], theirs[0], theirs[1][start:end])
            except NixlError as error:
                self._fault(write, str(error))
                break
            write.parts.append(RunningTransfer(operation, nbytes))
        self._settle(write)
        self._go()

    # ---- completion

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, Write)
        if ticket.state is WriteState.PENDING:
            self._settle(ticket)
            self._go()
        return ticket.state

    def abandon(self, ticket: Ticket) -> None:
        """Fail the ticket. Its transfers go on, driven as seldom as without any, and count until they have ended."""
        assert isinstance(ticket, Write)
        if ticket.state is WriteState.PENDING:
            ticket.state = WriteState.FAILED
            self._go()

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, Remote)
        self._collect()
        return peer.moved

    def last_error(self, peer: PeerMemory) -> str:
        assert isinstance(peer, Remote)
        return peer.last_error

    def _settle(self, write: Write) -> None:
        """Settle the write once all its transfers have ended."""
        for part in list(write.parts):
            if self._has_ended(part, write):
                self._agent.release(part.operation)
                write.parts.remove(part)
        try:
            if write.parts or (write.mark is not None and not write.mark.ready()):
                return
        except RuntimeError as error:  # the GPU has failed
            self._fault(write, str(error))
        write.mark = None
        if write in write.peer.open:
            write.peer.open.remove(write)
            write.release()
        if write.state is WriteState.PENDING:
            write.state = WriteState.FAILED if write.faulty else WriteState.DONE

    def _has_ended(self, part: RunningTransfer, write: Write) -> bool:
        """Return whether a transfer has ended; a failed one counts as ended after SETTLE_SECONDS."""
        if part.failed_at is not None:
            return self._clock() - part.failed_at >= SETTLE_SECONDS
        state = self._agent.state(part.operation)
        if state is WriteState.FAILED:
            part.failed_at = self._clock()
            self._fault(write, part.operation.fault)
        elif state is not WriteState.PENDING:
            write.peer.moved += part.nbytes
            return True
        return False

    def _collect(self) -> None:
        """Check all writes; remove detached peers without running transfers."""
        for peer in list(self._peers):
            for write in list(peer.open):
                self._settle(write)
            if not peer.attached and not peer.open:
                self._peers.remove(peer)
                self._remove_agent(peer)
        self._go()

    def _remove_agent(self, peer: Remote) -> None:
        if peer.pages is not None:
            self._agent.forget(peer.pages[1])
            peer.pages = None
        self._agent.remove(peer.target.incarnation)

    def _fault(self, write: Write, reason: str) -> None:
        write.faulty = write.peer.faulty = True
        write.peer.last_error = reason

    def _go(self) -> None:
        if self._progress is not None:
            writes = (write for peer in self._peers for write in peer.open)
            self._progress.busy(any(write.state is WriteState.PENDING for write in writes))


def make_sender(setup: SenderSetup[NixlOptions]) -> NixlSender:
    limits = setup.limits.with_inflight(setup.options.max_inflight_mib)
    return NixlSender(setup.incarnation, setup.options.nixl_devices, limits)
