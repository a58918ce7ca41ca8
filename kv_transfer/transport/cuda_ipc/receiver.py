"""The receiving side of CUDA IPC: one allocation for the pool, one segment for the records."""

from __future__ import annotations

from common.errors import ConfigError
from common.kv_cache.pool_layout import PoolLayout
from common.mps import mps_is_used
from kv_transfer.transport.base import DeviceMemory, Memory, ReceiverSetup, Region
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.digests import GpuDigests
from kv_transfer.transport.cuda.pool_memory import allocate_pool
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host.base import OneHostReceiver
from kv_transfer.transport.one_host.segment import OwnSegments, sweep_orphans


class CudaIpcReceiver(OneHostReceiver):
    """Owns the pool. Used from one thread, which may wait some microseconds for checksums of arrived pages."""

    kv: DeviceMemory

    def __init__(self, incarnation: str, device: int, cuda: CudaRuntime | None = None) -> None:
        super().__init__()
        self._segments = OwnSegments(incarnation)
        self._device = device
        self._cuda = cuda or CudaRuntime()
        self._death_is_proof = not mps_is_used()
        self._handle = b""

    def allocate(self, region: Region, nbytes: int) -> Memory:
        if region is Region.RECORDS:
            self.records = self._segments.create(region, nbytes)
            return self.records
        self.kv = allocate_pool(self._cuda, self._device, nbytes)
        try:
            self._handle = self._cuda.export(self.kv.address)
        except CudaError as error:
            raise ConfigError(
                "transfer.transport",
                f"cuda_ipc cannot share memory of cuda:{self._device} with other processes ({error}); "
                "choose another transport",
            ) from None
        return self.kv

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        super().open(layout, record_bytes)
        self.digests = GpuDigests(self._cuda, self.kv, layout)

    def describe(self, incarnation: str) -> CudaIpcDescription:
        records = self._segments.names[Region.RECORDS]
        return CudaIpcDescription(self._handle, self._cuda.uuid(self._device), records, process.current())

    def peer_is_dead(self, incarnation: str) -> bool:
        """Return whether the process has ended: the driver ends its kernels before its pidfd reports the end.

        Under MPS the server runs the kernels, so the death of a client proves nothing and the pages that it may have
        been writing stay in quarantine.
        """
        return self._death_is_proof and super().peer_is_dead(incarnation)

    def close(self) -> None:
        """Release the records; the pool is freed with the process, since freeing it under an open mapping is
        undefined.
        """
        self._segments.close()
        super().close()


def make_receiver(setup: ReceiverSetup[object]) -> CudaIpcReceiver:
    """Make the endpoint, after removing segments of processes that have ended."""
    assert setup.gpu is not None
    sweep_orphans()
    return CudaIpcReceiver(setup.incarnation, setup.gpu)
