"""Records segments as CUDA graphs in one memory pool. Used only on a GPU and tested by `tests/gpu/test_graphs.py`.

Each GraphRunner has one recorder and therefore one pool: graphs of a pool reuse each other's memory, which is safe as
long as they replay one after another on one stream and no output is read after the next replay (see `outputs`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.graphs.backends.base import CaptureError
from common.engine.ops.triton_kernel import launches


class CudaRecorder:
    """A `Recorder` on one GPU."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Captures never run on the default stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured = False

    @property
    def warm_ups(self) -> int:
        """The first graph takes two runs, which allocate workspaces; so does the next one after a capture that failed.

        Kernels that a later graph is the first to use are compiled and loaded while it is captured. Where launches run
        nothing, later kernels would read indices that no kernel has written.
        """
        return 2 if launches() and not self._captured else 0

    @contextmanager
    def session(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        gc_was_on = gc.isenabled()
        # A CUDA object that is freed in a reference cycle would call the driver during capture.
        gc.disable()
        self._stream.wait_stream(current)
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
            if gc_was_on:
                gc.enable()

    def begin(self) -> None:
        if self._graph is not None:
            raise CaptureError("a capture inside a capture")
        torch.cuda.synchronize(self._device)
        # Its workspace for this stream would otherwise come from the pool of the graph.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (sockets, loggers) may use the driver during the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def resume(self, like: Tensor) -> Tensor:
        self.begin()
        return torch.empty_like(like)  # from the pool: later segments reuse it once the caller drops it

    def end(self) -> Callable[[], None]:
        graph = self._graph
        assert graph is not None, "end without begin"
        graph.capture_end()
        self._graph = None
        self._captured = self._captured or launches()
        return graph.replay

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        self._captured = False
        if graph is not None:
            with suppress(RuntimeError):  # the capture has already failed
                graph.capture_end()
        # The old one may still count as being captured into, or have lost its last graph.
        self._pool = torch.cuda.graph_pool_handle()

    def handle(self, tensor: Tensor) -> Address:
        return Address.of(tensor)

    def memory(self) -> int:
        # Frees blocks of this stream outside the pool, which neither captures nor serving (on another stream) would
        # use.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class Address:
    """A tensor's memory and layout without ownership: the pool may give it to later segments, as during capture."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def open(self) -> Tensor:
        """Return a tensor over the memory. The recording keeps the pool, and so the address, alive."""
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        elements = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride))
        raw = torch.as_tensor(_Bytes(self.pointer, elements * self.dtype.itemsize), device=self.device)
        return raw.view(self.dtype).as_strided(self.shape, self.stride)


class _Bytes:
    """Memory described by https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }
