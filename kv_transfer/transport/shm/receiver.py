"""The decode node's side of shm: the pool and the record slots are shared memory segments that it owns."""

from __future__ import annotations

import mmap

from kv_transfer.transport.base import ReceiverEndpoint, ReceiverSetup, Region, Window
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.one_host.peer_watch import PeerWatches
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.one_host.segment import sweep_orphans
from kv_transfer.transport.shm.kind import ShmDescription, ShmOptions


class ShmReceiver(ReceiverEndpoint):
    """Owns the segments. Their names exist until `close`, since prefill nodes may attach at any time."""

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

    def describe(self, incarnation: str) -> ShmDescription:
        return ShmDescription(self._names[Region.KV], self._names[Region.RECORDS], process.current())

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        self._watches.admit(incarnation, process)

    def announce(self, window: Window) -> None:
        """No-op: the sender has mapped the whole pool."""

    def revoke(self, generation: int) -> bool:
        return False

    def peer_is_dead(self, incarnation: str) -> bool:
        return self._watches.dead(incarnation)

    def forget(self, incarnation: str) -> None:
        self._watches.forget(incarnation)

    def close(self) -> None:
        for name in self._names.values():
            shm_segment.unlink(name)
        self._names.clear()
        self._watches.close()
        self._maps.clear()  # they are unmapped when the engine drops its last view


def make_receiver(setup: ReceiverSetup[ShmOptions]) -> ShmReceiver:
    """Make the endpoint, after removing segments of processes that have ended."""
    sweep_orphans()
    return ShmReceiver(setup.incarnation)
