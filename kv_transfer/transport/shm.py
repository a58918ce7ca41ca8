"""Same host: the decode node's pool is shared memory, and the prefill node copies into it.

A write is one memcpy per copy and is done when `write` returns. The receiver cannot shut the sender out, so
pages of a room that ends early wait for the sender's word, or for its death, which a pidfd proves.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from common.errors import HandshakeRefused
from kv_transfer.copy_plan import Copy
from kv_transfer.transport import process, shm_segment
from kv_transfer.transport.base import (
    PeerMemory,
    ReceiverEndpoint,
    Region,
    Target,
    Ticket,
    Window,
    WriteState,
)
from kv_transfer.transport.description import ShmDescription, TransportDescription, kind
from kv_transfer.transport.layers import HostEndpoint
from kv_transfer.transport.peer_watch import PeerWatches
from kv_transfer.transport.process import ProcessIdentity
from kv_transfer.transport.shm_segment import sweep_orphans

__all__ = ["ShmReceiver", "ShmSender", "sweep_orphans"]


class _Mapped(PeerMemory):
    """A peer's two segments, mapped."""

    def __init__(self, target: Target, kv: mmap.mmap, records: mmap.mmap) -> None:
        super().__init__(target)
        self.maps = [kv, records]
        self.kv = memoryview(kv)
        self.records = memoryview(records)
        self.moved = 0

    def unmap(self) -> None:
        self.kv.release()
        self.records.release()
        for mapped in self.maps:
            mapped.close()
        self.maps = []


class _Settled(Ticket):
    def __init__(self, state: WriteState) -> None:
        self.state = state


_DONE = _Settled(WriteState.DONE)
_FAILED = _Settled(WriteState.FAILED)


class ShmSender(HostEndpoint):
    """Copies from the own pool, wherever it is, into mapped segments."""

    def __init__(self) -> None:
        self._peers: list[_Mapped] = []

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        if not isinstance(description, ShmDescription):
            raise HandshakeRefused(
                f"it takes pages by {kind(description)}, this prefill node sends by shm; "
                "set the same transport on both"
            )
        if description.owner.host != process.current().host:
            raise HandshakeRefused(
                "it runs on another host or in another pid namespace, where shared memory does not reach; "
                "use the tcp transport on both"
            )
        for name in (description.kv, description.records):
            if not shm_segment.is_of(name, description.owner, target.incarnation):
                raise HandshakeRefused(f"{name!r} is not the name of a segment that it made")
        kv = shm_segment.attach(description.kv, target.kv_bytes)
        try:
            records = shm_segment.attach(description.records, target.records_bytes)
        except HandshakeRefused:
            kv.close()
            raise
        peer = _Mapped(target, kv, records)
        self._peers.append(peer)
        return peer

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        assert isinstance(peer, _Mapped)
        if not peer.maps:
            return _FAILED
        source, target = self.kv, peer.kv
        for copy in copies:
            target[copy.dst : copy.dst + copy.length] = source[copy.src : copy.src + copy.length]
            peer.moved += copy.length
        return _DONE

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, _Mapped)
        if not peer.maps:
            return _FAILED
        peer.records[offset : offset + len(data)] = data
        peer.moved += len(data)
        return _DONE

    def poll(self, ticket: Ticket) -> WriteState:
        assert isinstance(ticket, _Settled)
        return ticket.state

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, _Mapped)
        return peer.moved

    def detach(self, peer: PeerMemory) -> None:
        assert isinstance(peer, _Mapped)
        if peer.maps:
            peer.unmap()
            self._peers.remove(peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)


class ShmReceiver(ReceiverEndpoint):
    """Owns the segments. Their names exist until `close`, since prefill nodes may come at any time."""

    kv: memoryview

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._names: dict[Region, str] = {}
        self._maps: list[mmap.mmap] = []
        self._watches = PeerWatches()

    def allocate(self, region: Region, nbytes: int) -> memoryview:
        name = shm_segment.segment_name(self._incarnation, region.value)
        mapped = shm_segment.create(name, nbytes)
        self._names[region] = name
        self._maps.append(mapped)
        view = memoryview(mapped)
        if region is Region.KV:
            self.kv = view
        else:
            self.records = view
        return view

    def describe(self, incarnation: str) -> TransportDescription:
        return ShmDescription(self._names[Region.KV], self._names[Region.RECORDS], process.current())

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        self._watches.admit(incarnation, process)

    def announce(self, window: Window) -> None:
        """Nothing to open: the sender has the whole pool mapped."""

    def revoke(self, generation: int) -> bool:
        return False

    def proves_dead(self, incarnation: str) -> bool:
        return self._watches.dead(incarnation)

    def forget(self, incarnation: str) -> None:
        self._watches.forget(incarnation)

    def close(self) -> None:
        for name in self._names.values():
            shm_segment.unlink(name)
        self._names.clear()
        self._watches.close()
        self._maps.clear()  # unmapped when the last view of the engine goes
