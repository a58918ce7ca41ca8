"""The decode node's side of shm: the pool and the record slots are shared memory segments that it owns."""

from __future__ import annotations

from kv_transfer.transport.base import ReceiverSetup, Region
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.base import MappedReceiver
from kv_transfer.transport.one_host.segment import OwnSegments, sweep_orphans
from kv_transfer.transport.shm.kind import ShmDescription


class ShmReceiver(MappedReceiver):
    """Owns the segments."""

    def __init__(self, incarnation: str) -> None:
        super().__init__()
        self._segments = OwnSegments(incarnation)

    def create(self, region: Region, nbytes: int) -> memoryview:
        return self._segments.create(region, nbytes)

    def describe(self, incarnation: str) -> ShmDescription:
        names = self._segments.names
        return ShmDescription(names[Region.KV], names[Region.RECORDS], process.current())

    def close(self) -> None:
        self._segments.close()
        super().close()


def make_receiver(setup: ReceiverSetup[object]) -> ShmReceiver:
    """Make the endpoint, after removing segments of processes that have ended."""
    sweep_orphans()
    return ShmReceiver(setup.incarnation)
