"""The receiving side of CUDA IPC: one allocation for the pool, one segment for the records."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.pair_plan import Side
from kv_transfer.transport.base import DeviceMemory, Memory, ReceiverEndpoint, ReceiverSetup, Region, Window
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.digests import GpuDigests
from kv_transfer.transport.cuda_ipc.kind import CudaIpcDescription, CudaIpcOptions
from kv_transfer.transport.one_host import process
from kv_transfer.transport.one_host import segment as shm_segment
from kv_transfer.transport.one_host.peer_watch import PeerWatches
from kv_transfer.transport.one_host.process import ProcessIdentity
from kv_transfer.transport.one_host.segment import sweep_orphans


def mps_is_used() -> bool:
    """Return whether kernels of this user's processes run inside an MPS server, which outlives its clients."""
    return "CUDA_MPS_PIPE_DIRECTORY" in os.environ or Path("/tmp/nvidia-mps/control").exists()


class CudaIpcReceiver(ReceiverEndpoint):
    """Owns the pool. Used from one thread, which may wait some microseconds for checksums of arrived pages."""

    kv: DeviceMemory

    def __init__(self, incarnation: str, device: int, cuda: CudaRuntime | None = None) -> None:
        self._incarnation = incarnation
        self._device = device
        self._cuda = cuda or CudaRuntime()
        self._watches = PeerWatches()
        self._death_is_proof = not mps_is_used()
        self._handle = b""
        self._records_name = ""
        self._records_map: mmap.mmap | None = None

    def allocate(self, region: Region, nbytes: int) -> Memory:
        if region is Region.RECORDS:
            name = shm_segment.segment_name(self._incarnation, region.value)
            self._records_map = shm_segment.create(name, nbytes)
            self._records_name = name
            self.records = memoryview(self._records_map)
            return self.records
        try:
            address = self._cuda.malloc(self._device, nbytes)
            self._handle = self._cuda.export(address)
        except CudaError as error:
            raise ConfigError(
                "",
                f"{nbytes >> 20} MiB of KV pages cannot be allocated on cuda:{self._device} and shared ({error}); "
                "lower decode.pool_tokens, or free memory of that GPU",
            ) from None
        self.kv = DeviceMemory(address, nbytes, self._device)
        return self.kv

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        super().open(layout, record_bytes)
        self._digests = GpuDigests(self._cuda, self.kv, layout)

    def page_digests(self, side: Side, pages: Sequence[int]) -> list[int]:
        """Return the checksums; waits briefly for the GPU."""
        return self._digests.now(side, pages)

    def state_digest(self, side: Side, slot: int) -> int:
        """Return the checksum; waits briefly for the GPU."""
        return self._digests.state(side, slot)

    def describe(self, incarnation: str) -> CudaIpcDescription:
        return CudaIpcDescription(
            self._handle, self._cuda.uuid(self._device), self._records_name, process.current()
        )

    def admit(self, incarnation: str, process: ProcessIdentity) -> None:
        self._watches.admit(incarnation, process)

    def announce(self, window: Window) -> None:
        """No-op: the sender has mapped the whole pool."""

    def revoke(self, generation: int) -> bool:
        return False

    def peer_is_dead(self, incarnation: str) -> bool:
        """Return whether the process has ended: the driver ends its kernels before its pidfd reports the end.

        Under MPS the server runs the kernels, so the death of a client proves nothing and the pages that it may have
        been writing stay in quarantine.
        """
        return self._death_is_proof and self._watches.dead(incarnation)

    def forget(self, incarnation: str) -> None:
        self._watches.forget(incarnation)

    def close(self) -> None:
        """Release the records; the pool is freed with the process, since freeing it under an open mapping is
        undefined.
        """
        if self._records_name:
            shm_segment.unlink(self._records_name)
            self._records_name = ""
        self._watches.close()
        self._records_map = None


def make_receiver(setup: ReceiverSetup[CudaIpcOptions]) -> CudaIpcReceiver:
    """Make the endpoint, after removing segments of processes that have ended."""
    assert setup.gpu is not None
    sweep_orphans()
    return CudaIpcReceiver(setup.incarnation, setup.gpu)
