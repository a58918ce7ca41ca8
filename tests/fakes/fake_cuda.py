"""A CUDA runtime over host memory: the interface of `CudaRuntime`, with streams that run when the test says so."""

from __future__ import annotations

import contextlib
import ctypes
import secrets
from collections.abc import Iterator
from typing import Any

import torch

from kv_transfer.transport.cuda.cudart import CudaError


class FakeMark:
    def __init__(self, lane: FakeLane) -> None:
        self.lane = lane

    def ready(self) -> bool:
        if self.lane.fault:
            raise RuntimeError(self.lane.fault)
        return not self.lane.held

    def wait(self) -> None:
        if self.lane.fault:
            raise RuntimeError(self.lane.fault)
        self.lane.waited += 1
        self.lane.held = False


class FakeLane:
    handle = 1

    def __init__(self) -> None:
        self.held = False  # marks stay pending
        self.fault = ""
        self.launch_fault = ""
        self.waited = 0
        self.events: list[Any] = []

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        if self.launch_fault:
            raise RuntimeError(self.launch_fault)
        yield

    def mark(self) -> FakeMark:
        return FakeMark(self)

    def wait_for(self, mark: Any) -> None:
        self.events.append(mark)


class FakeHost:
    """State shared by the processes of one host: allocations by handle, GPUs by UUID."""

    def __init__(self, gpus: int = 2) -> None:
        self.uuids = [f"GPU-{n}" for n in range(gpus)]
        self.buffers: dict[int, ctypes.Array[Any]] = {}
        self.handles: dict[bytes, int] = {}
        self.peer_access = True


class FakeCuda:
    """The view of one process: `visible` are the host's GPUs in the order of its ordinals."""

    def __init__(self, host: FakeHost, visible: tuple[int, ...] = (0, 1)) -> None:
        self.host = host
        self.visible = visible
        self.lanes: list[FakeLane] = []
        self.opened: list[tuple[int, int]] = []  # (device, address)
        self.exports: dict[bytes, int] = {}  # of this process
        self.copies = 0
        self.batches = True  # the runtime has the call for many copies
        self.batch_fault = ""
        self.batches_lose = 0  # pieces at the end of every batch
        self.batches_begun = 0
        self.most_batches = 1 << 30  # after which no more are possible
        self.full = False
        self.ordered, self.flushes = False, True  # what a network card wrote is visible; can be made visible
        self.flushed: list[int] = []
        self.events = 0
        self.held_by: list[Any] = []  # marks that the computing stream waits for

    def malloc(self, device: int, nbytes: int) -> int:
        if self.full:
            raise CudaError("cudaMalloc: out of memory (CUDA error 2)")
        buffer = (ctypes.c_ubyte * (nbytes + 4096))()
        address = -(-ctypes.addressof(buffer) // 4096) * 4096
        self.host.buffers[address] = buffer
        return address

    def export(self, address: int) -> bytes:
        handle = secrets.token_bytes(64)
        self.host.handles[handle] = self.exports[handle] = address
        return handle

    def exported(self, handle: bytes) -> int | None:
        return self.exports.get(handle)

    def open(self, device: int, handle: bytes) -> int:
        if handle not in self.host.handles:
            raise CudaError("cudaIpcOpenMemHandle: invalid argument (CUDA error 1)")
        address = self.host.handles[handle]
        self.opened.append((device, address))
        return address

    def close(self, device: int, address: int) -> None:
        self.opened.remove((device, address))

    def span(self, address: int) -> int:
        return len(self.host.buffers[address]) - 4096

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    def copy(self, dst: int, src: int, nbytes: int, lane: FakeLane) -> None:
        self.copies += 1
        ctypes.memmove(dst, src, nbytes)

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, device: int, stream: int) -> bool:
        if self.batch_fault:
            raise CudaError(self.batch_fault)
        if not self.batches or self.batches_begun == self.most_batches:
            return False
        self.batches_begun += 1
        moves = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        for target, source, size in moves[: len(moves) - self.batches_lose]:
            ctypes.memmove(target, source, size)
        return True

    def use_single_copies(self) -> None:
        self.batches = False

    def flush_needed(self, device: int) -> bool:
        if not self.ordered and not self.flushes:
            raise CudaError("the driver cannot flush it")
        return not self.ordered

    def flush(self, device: int) -> None:
        self.flushed.append(device)

    def uuid(self, device: int) -> str:
        return self.host.uuids[self.visible[device]]

    def find(self, uuid: str) -> int | None:
        return next((n for n in range(len(self.visible)) if self.uuid(n) == uuid), None)

    def reaches(self, device: int, other: int) -> bool:
        return device == other or self.host.peer_access

    def now(self, device: int) -> int:
        """Return the number of the current event, counted from 1."""
        self.events += 1
        return self.events

    def hold(self, device: int, mark: Any) -> None:
        self.held_by.append(mark)

    def lane(self, device: int) -> FakeLane:
        self.lanes.append(FakeLane())
        return self.lanes[-1]
