"""The receiving side of NIXL: pool and records are registered with one agent that all prefill nodes write to."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

from common.errors import ConfigError
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.transport.base import DeviceMemory, Memory, ReceiverEndpoint, ReceiverSetup, Region, Window
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime
from kv_transfer.transport.cuda.digests import GpuDigests
from kv_transfer.transport.cuda.pool_memory import allocate_pool
from kv_transfer.transport.nixl.agent import NixlAgent, ProgressThread, span_of
from kv_transfer.transport.nixl.kind import MAX_METADATA_BYTES, NixlDescription, NixlOptions
from kv_transfer.transport.nixl.liveness import LivenessListener


class NixlReceiver(ReceiverEndpoint):
    """`device` is the CUDA ordinal of the pool, None on a CPU; liveness connections go to host:port (0: any)."""

    def __init__(
        self,
        incarnation: str,
        devices: str,
        host: str = "127.0.0.1",
        port: int = 0,
        device: int | None = None,
        *,
        cuda: CudaRuntime | None = None,
        library: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start NIXL. Raises ConfigError if NIXL is not installed or does not start on these network `devices`."""
        self._device = device
        self._cuda = None if device is None else cuda or CudaRuntime()
        self._agent = NixlAgent(incarnation, devices, library)
        self.liveness = LivenessListener(host, port, clock)
        self._open: set[int] = set()  # generations whose pages may be written
        self._progress: ProgressThread | None = None
        self._flush = False

    def allocate(self, region: Region, nbytes: int) -> Memory:
        if region is Region.RECORDS:
            self.records = memoryview(mmap.mmap(-1, max(1, nbytes)))
            return self.records
        if self._cuda is None or self._device is None:
            self.kv = memoryview(mmap.mmap(-1, max(1, nbytes)))
            return self.kv
        self.kv = allocate_pool(self._cuda, self._device, nbytes)
        return self.kv

    def open(self, layout: PoolLayout, record_bytes: int) -> None:
        super().open(layout, record_bytes)
        if self._cuda is not None and isinstance(self.kv, DeviceMemory):
            self.digests = GpuDigests(self._cuda, self.kv, layout)
            try:
                self._flush = self._cuda.flush_needed(self.kv.device)
            except CudaError as error:
                raise ConfigError("transfer.transport", f"nixl cannot write here: {error}") from None
        self._kv_block, self._records_block = span_of(self.kv), span_of(self.records)
        self._agent.register(self._kv_block)
        self._agent.register(self._records_block)
        self._metadata = self._agent.metadata()  # taken once: it may change, and Hello must not
        if len(self._metadata) > MAX_METADATA_BYTES:
            raise ConfigError(
                "transfer.nixl_devices",
                f"NIXL's metadata has {len(self._metadata)} bytes, the limit is {MAX_METADATA_BYTES}; name fewer",
            )
        self._progress = ProgressThread(self._agent.progress, self._device)

    def record(self, slot: int) -> bytes:
        """Return the record, and make what the network card wrote visible: the pages are read after this call."""
        if self._flush and self._cuda is not None and self._device is not None:
            self._cuda.flush(self._device)
        return super().record(slot)

    def describe(self, incarnation: str) -> NixlDescription:
        return NixlDescription(
            self._metadata,
            self._kv_block.address,
            -1 if self._device is None else self._device,
            self._records_block.address,
            self.liveness.describe(incarnation),
        )

    def announce(self, window: Window) -> None:
        """Note the open window; the sender has the keys of the whole pool."""
        self._open.add(window.generation)
        self._go()

    def revoke(self, generation: int) -> bool:
        self._open.discard(generation)
        self._go()
        return False

    def peer_is_dead(self, incarnation: str) -> bool:
        return self.liveness.dead(incarnation)

    def forget(self, incarnation: str) -> None:
        self.liveness.forget(incarnation)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._agent.close()
        self.liveness.close()

    def _go(self) -> None:
        if self._progress is not None:
            self._progress.busy(bool(self._open))


def make_receiver(setup: ReceiverSetup[NixlOptions]) -> NixlReceiver:
    return NixlReceiver(setup.incarnation, setup.options.nixl_devices, setup.host, setup.port, setup.gpu)
