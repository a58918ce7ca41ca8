"""The prefill node's side of shm: copies from its own pool into the mapped segments of a decode node."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from common.errors import HandshakeRefused
from kv_transfer.copy_plan import Copy
from kv_transfer.transport.base import PeerMemory, SenderSetup, Target, Ticket, WriteState
from kv_transfer.transport.host_rows import copy_rows
from kv_transfer.transport.layers import HostEndpoint
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.segment import attach_owned
from kv_transfer.transport.shm.kind import ShmDescription


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
    """Copies from this node's pool, in any host memory, into mapped segments."""

    takes = ShmDescription

    def __init__(self) -> None:
        self._peers: list[_Mapped] = []

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        assert isinstance(description, ShmDescription)
        if description.owner.host != process.current().host:
            raise HandshakeRefused(
                "it runs on another host or in another pid namespace, with which it cannot share memory; "
                "use the tcp transport on both"
            )
        owner, incarnation = description.owner, target.incarnation
        kv = attach_owned(description.kv, owner, incarnation, target.kv_bytes)
        try:
            records = attach_owned(description.records, owner, incarnation, target.records_bytes)
        except (HandshakeRefused, OSError):
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
            copy_rows(source, target, copy)
            peer.moved += copy.nbytes
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


def make_sender(setup: SenderSetup[object]) -> ShmSender:
    return ShmSender()
