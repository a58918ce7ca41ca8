"""The prefill node's side: writes into the files of a decode node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from common.errors import HandshakeRefused
from kv_transfer.copy_plan import Copy
from kv_transfer.transport.base import PeerMemory, SenderSetup, Target, Ticket, WriteState
from kv_transfer.transport.layers import HostEndpoint
from tests.fakes.file_transport.kind import FileDescription, FileOptions


class _Files(PeerMemory):
    def __init__(self, target: Target, kv: int, records: int) -> None:
        super().__init__(target)
        self.kv = kv
        self.records = records
        self.moved = 0


class FileSender(HostEndpoint):
    takes = FileDescription

    def __init__(self) -> None:
        self._peers: list[_Files] = []

    def attach(self, target: Target) -> PeerMemory:
        description = target.description
        assert isinstance(description, FileDescription)
        try:
            opened = [os.open(path, os.O_RDWR) for path in (description.kv, description.records)]
        except OSError as error:
            raise HandshakeRefused(f"its files cannot be opened ({error.strerror})") from None
        peer = _Files(target, *opened)
        self._peers.append(peer)
        return peer

    def write(self, peer: PeerMemory, copies: Sequence[Copy], generation: int) -> Ticket:
        assert isinstance(peer, _Files)
        for copy in copies:
            peer.moved += os.pwrite(peer.kv, self.kv[copy.src : copy.src + copy.length], copy.dst)
        return Ticket()

    def write_record(self, peer: PeerMemory, offset: int, data: bytes, generation: int) -> Ticket:
        assert isinstance(peer, _Files)
        peer.moved += os.pwrite(peer.records, data, offset)
        return Ticket()

    def poll(self, ticket: Ticket) -> WriteState:
        return WriteState.DONE

    def progress(self, peer: PeerMemory) -> int:
        assert isinstance(peer, _Files)
        return peer.moved

    def detach(self, peer: PeerMemory) -> None:
        assert isinstance(peer, _Files)
        self._peers.remove(peer)
        os.close(peer.kv)
        os.close(peer.records)

    def close(self) -> None:
        for peer in list(self._peers):
            self.detach(peer)


def make_sender(setup: SenderSetup[FileOptions]) -> FileSender:
    return FileSender()
