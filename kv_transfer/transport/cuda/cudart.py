"""The CUDA runtime calls that the GPU transports need: raw allocations, IPC handles and side streams.

torch allocates pieces of larger blocks, whose handles open the whole block with the wrong GPU current. So the pool is
a raw cudaMalloc, and every call on it goes through ctypes, on the primary context that torch uses too. Tests replace
`CudaRuntime` by a class of the same interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from kv_transfer.transport.cuda.batch_copy import Addresses, BatchCopy

IPC_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess
_FLUSH_OPTIONS: Final = 117  # cudaDevAttrGPUDirectRDMAFlushWritesOptions
_FLUSH_FROM_HOST: Final = 1
_WRITES_ORDERING: Final = 118  # cudaDevAttrGPUDirectRDMAWritesOrdering
_ORDERED_FOR_OWNER: Final = 100
_COPY_DEFAULT: Final = 4  # cudaMemcpyDefault: the driver derives the direction from the addresses


class CudaError(RuntimeError):
    """A call that the runtime refused; the text contains the call and the reason."""


class Mark(Protocol):
    """A point on a lane."""

    def ready(self) -> bool:
        """Return at once whether everything before it is done. Raises RuntimeError once the GPU has failed."""
        ...

    def wait(self) -> None: ...


class Lane(Protocol):
    """A stream that runs concurrently with the computing stream."""

    @property
    def handle(self) -> int: ...
    def entered(self) -> AbstractContextManager[None]:
        """Context in which torch launches and allocates on this lane."""
        ...

    def mark(self) -> Mark: ...
    def wait_for(self, mark: Mark) -> None:
        """Make later launches on this lane start after this point of another stream."""
        ...


class CudaRuntime:
    """The CUDA runtime of this process. Raises CudaError if there is no CUDA device."""

    _exported: ClassVar[dict[bytes, int]] = {}  # handle -> address, in this process

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise CudaError("this machine has no CUDA device that torch can use")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        major = str(torch.version.cuda).partition(".")[0]
        try:
            self._runtime = ctypes.CDLL(f"libcudart.so.{major}")  # the one that torch has loaded
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"the CUDA libraries cannot be loaded: {error}") from None
        self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
        self._batch = BatchCopy(self._runtime, int(major), self._check)

    # ---- memory

    def malloc(self, device: int, nbytes: int) -> int:
        """Return the address of a zeroed allocation of its own, for which an IPC handle can be made."""
        address = ctypes.c_void_p()
        with self._on(device):
            self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
            self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(nbytes))
            self._call("cudaDeviceSynchronize")
        return int(address.value or 0)

    def tensor(self, address: int, nbytes: int) -> Tensor:
        return device_tensor(address, nbytes)

    def span(self, address: int) -> int:
        """Return the bytes of the allocation that begins at this address; it may be a mapped one."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        found = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        if found:
            raise CudaError(f"cuMemGetAddressRange: driver error {found}")
        return int(size.value) - (address - int(base.value))

    def copy(self, dst: int, src: int, nbytes: int, lane: Lane) -> None:
        """Start one copy between any two GPUs on this lane."""
        self._copy(dst, src, nbytes, lane.handle)

    def _copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(dst),
            ctypes.c_void_p(src),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_COPY_DEFAULT),
            ctypes.c_void_p(stream),
        )

    def copy_many(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: torch.cuda.Stream
    ) -> None:
        """Start copies between addresses of one GPU and pinned memory, in any order, on a stream of that GPU."""
        device, handle = stream.device_index, int(stream.cuda_stream)
        if self.copy_batch(targets, sources, sizes, device, handle):
            return
        with self._on(device):
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                self._copy(target, source, size, handle)

    def copy_batch(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, device: int, stream: int
    ) -> bool:
        """Start copies by one call, on a stream other than the default one. Return False if that is not possible."""
        with self._on(device):
            return self._batch.start(targets, sources, sizes, stream)

    def use_single_copies(self) -> None:
        """Let `copy_many` make no more use of batches."""
        self._batch.refuse()

    def flush_needed(self, device: int) -> bool:
        """Return whether `flush` is required between a network card's writes and the kernels that read them.

        Raises CudaError if it is required and the driver does not support it.
        """
        if self._attribute(_WRITES_ORDERING, device) >= _ORDERED_FOR_OWNER:
            return False
        if not self._attribute(_FLUSH_OPTIONS, device) & _FLUSH_FROM_HOST:
            raise CudaError(
                f"kernels of cuda:{device} may read before the writes of a network card are visible, and the "
                "driver cannot flush it"
            )
        return True

    def flush(self, device: int) -> None:
        """Make the writes of network cards to this GPU visible to its kernels."""
        with self._on(device):
            self._call(
                "cudaDeviceFlushGPUDirectRDMAWrites", ctypes.c_int(0), ctypes.c_int(_ORDERED_FOR_OWNER)
            )

    def _attribute(self, number: int, device: int) -> int:
        value = ctypes.c_int()
        self._call("cudaDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(device))
        return value.value

    # ---- other processes and other GPUs

    def export(self, address: int) -> bytes:
        """Return the handle by which other processes open this allocation."""
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        self._exported[bytes(handle)] = address
        return bytes(handle)

    def exported(self, handle: bytes) -> int | None:
        """Return the address of an allocation of this process, which cannot open its own handles; None if unknown."""
        return self._exported.get(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation for kernels of `device`."""
        address = ctypes.c_void_p()
        with self._on(device):
            self._call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(address),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_PEER_ACCESS),
            )
        return int(address.value or 0)

    def close(self, device: int, address: int) -> None:
        with self._on(device):
            self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def uuid(self, device: int) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def find(self, uuid: str) -> int | None:
        """Return the ordinal of that GPU in this process; None if it is not visible."""
        return next((n for n in range(torch.cuda.device_count()) if self.uuid(n) == uuid), None)

    def reaches(self, device: int, other: int) -> bool:
        """Return whether kernels of `device` can write memory of `other`."""
        return device == other or torch.cuda.can_device_access_peer(device, other)

    def lane(self, device: int) -> Lane:
        return _StreamLane(device)

    def now(self, device: int) -> Mark:
        """Return a mark after all work that the current stream of this GPU has been given."""
        return _EventMark(torch.cuda.current_stream(device))

    def hold(self, device: int, mark: Mark) -> None:
        """Make later launches on the current stream of this GPU start after a mark of another stream."""
        assert isinstance(mark, _EventMark)
        torch.cuda.current_stream(device).wait_event(mark.event)

    # ---- calling

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        with torch.cuda.device(device):
            yield

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._runtime, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            self._runtime.cudaGetLastError()  # clears the error, or torch would find it at its next call
            text = self._runtime.cudaGetErrorString(ctypes.c_int(status))
            raise CudaError(f"{name}: {text.decode()} (CUDA error {status})")


def device_tensor(address: int, nbytes: int) -> Tensor:
    """Return [nbytes] uint8 over GPU memory that this process can access, without owning it."""
    found = torch.as_tensor(_Span(address, nbytes))
    if found.data_ptr() != address:
        raise CudaError("torch copied memory instead of creating a view of it")
    return found


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Span:
    """Flat bytes in the form in which torch accepts them from other libraries."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def ready(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class _StreamLane:
    """A high-priority stream: its few blocks run before the waiting blocks of a long forward."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        return _EventMark(self._stream)

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        self._stream.wait_event(mark.event)
