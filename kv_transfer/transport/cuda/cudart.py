"""What the CUDA IPC transport needs of the CUDA runtime: raw allocations, IPC handles and side streams.

torch hands out pieces of larger blocks, whose handles open the whole block with the wrong GPU current; so the
pool is a raw cudaMalloc, and everything about it goes through ctypes, on the primary context that torch uses
too. Tests put a class of the same shape in place of `CudaRuntime`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

IPC_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess
_FLUSH_OPTIONS: Final = 117  # cudaDevAttrGPUDirectRDMAFlushWritesOptions
_FLUSH_FROM_HOST: Final = 1
_WRITES_ORDERING: Final = 118  # cudaDevAttrGPUDirectRDMAWritesOrdering
_ORDERED_FOR_OWNER: Final = 100
_COPY_DEFAULT: Final = 4  # cudaMemcpyDefault: the driver sees from the addresses where they lie


class CudaError(RuntimeError):
    """A call that the runtime refused; the text names the call and the reason."""


class Mark(Protocol):
    """A point on a lane."""

    def ready(self) -> bool:
        """Everything before it is done; never blocks. Raises RuntimeError once the GPU has failed."""
        ...

    def wait(self) -> None: ...


class Lane(Protocol):
    """A stream beside the one that computes."""

    @property
    def handle(self) -> int: ...
    def entered(self) -> AbstractContextManager[None]:
        """Within, torch launches here and allocates for here."""
        ...

    def mark(self) -> Mark: ...
    def wait_for(self, mark: Mark) -> None:
        """What is launched from here on starts behind this point of another stream."""
        ...


class CudaRuntime:
    """The runtime of this process. Raises CudaError where there is no CUDA device."""

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

    # ---- memory

    def malloc(self, device: int, nbytes: int) -> int:
        """Address of a zeroed allocation of its own, which an IPC handle can name."""
        address = ctypes.c_void_p()
        with self._on(device):
            self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
            self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(nbytes))
            self._call("cudaDeviceSynchronize")
        return int(address.value or 0)

    def free(self, device: int, address: int) -> None:
        with self._on(device):
            self._call("cudaFree", ctypes.c_void_p(address))

    def tensor(self, address: int, nbytes: int) -> Tensor:
        return device_tensor(address, nbytes)

    def span(self, address: int) -> int:
        """Bytes of the allocation that begins at this address, a mapped one included."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        found = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        if found:
            raise CudaError(f"cuMemGetAddressRange: driver error {found}")
        return int(size.value) - (address - int(base.value))

    def copy(self, dst: int, src: int, nbytes: int, lane: Lane) -> None:
        """Start one copy between any two GPUs on this lane."""
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(dst),
            ctypes.c_void_p(src),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_COPY_DEFAULT),
            ctypes.c_void_p(lane.handle),
        )

    def flush_needed(self, device: int) -> bool:
        """Whether `flush` must come between a network card's writes and the kernels that read them.

        Raises CudaError where it must and cannot.
        """
        if self._attribute(_WRITES_ORDERING, device) >= _ORDERED_FOR_OWNER:
            return False
        if not self._attribute(_FLUSH_OPTIONS, device) & _FLUSH_FROM_HOST:
            raise CudaError(
                f"kernels of cuda:{device} may read before what a network card wrote there is visible, and the "
                "driver cannot flush it"
            )
        return True

    def flush(self, device: int) -> None:
        """What network cards have written to this GPU is visible to its kernels afterwards."""
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
        """The handle by which other processes open this allocation."""
        handle = _IpcHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's allocation, to be reached by kernels of `device`."""
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
        """The ordinal of that GPU here; None where it is not visible to this process."""
        return next((n for n in range(torch.cuda.device_count()) if self.uuid(n) == uuid), None)

    def reaches(self, device: int, other: int) -> bool:
        """Kernels of `device` can write memory of `other`."""
        return device == other or torch.cuda.can_device_access_peer(device, other)

    def lane(self, device: int) -> Lane:
        return _StreamLane(device)

    def now(self, device: int) -> Mark:
        """Behind all that the current stream of this GPU has been given."""
        return _EventMark(torch.cuda.current_stream(device))

    # ---- calling

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        with torch.cuda.device(device):
            yield

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._runtime, name)(*arguments)
        if status:
            self._runtime.cudaGetLastError()  # taken: torch must not find it at its next call
            text = self._runtime.cudaGetErrorString(ctypes.c_int(status))
            raise CudaError(f"{name}: {text.decode()} (CUDA error {status})")


def device_tensor(address: int, nbytes: int) -> Tensor:
    """[nbytes] uint8 over GPU memory that this process can reach; does not own it."""
    found = torch.as_tensor(_Span(address, nbytes))
    if found.data_ptr() != address:
        raise CudaError("torch copied memory that it was to look at")
    return found


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Span:
    """Flat bytes as torch takes them from other libraries."""

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
    """Of high priority: its few blocks go ahead of the waiting blocks of a long forward."""

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
