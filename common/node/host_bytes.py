"""Host memory for copies of a device, pinned for a GPU, and unpinned only once no copy uses it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from common.errors import InternalError
from common.observability.logs import Log

END_SECONDS: Final = 5.0  # that the end of a node waits for copies in flight
_POLL_SECONDS: Final = 0.001

Ended = Callable[[], bool]

# Memory whose copies have not ended: never freed, since the device may write to it.
in_use: list[Tensor] = []


class HostBytes:
    """[nbytes] uint8 in `tensor`. Dropping it, or `close`, waits until copies to and from it have ended."""

    def __init__(self, nbytes: int, device: torch.device, runtime: Any = None) -> None:
        """Allocate, and pin if the device is a GPU. Raises InternalError if it cannot be pinned.

        It is not allocated by torch's cache of pinned memory, which would round up to a power of two.

        Args:
            runtime: the CUDA runtime as torch exposes it; None: that of this process.
        """
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)
        # By lane: whether its latest copies have ended, and so all before them.
        self._ends: dict[str, Ended] = {}
        self._unpin: Callable[[], object] = _nothing  # on a CPU copies have ended when they are started
        if device.type != "cuda":
            return
        runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(self.tensor.data_ptr(), nbytes, 0))
        if status:
            raise InternalError(
                f"CUDA could not pin {nbytes} bytes of host memory for cached prefixes (error {status}); write a "
                "lower host_mib of its section, or raise the limit of locked memory (ulimit -l)"
            )
        # Memory that is freed while it is pinned cannot be pinned again by whatever is allocated at its address. At the
        # exit of the process the runtime may be gone, and the driver unpins everything.
        finalizer = weakref.finalize(self, _unpin, runtime, self.tensor, self._ends)
        finalizer.atexit = False
        self._unpin = finalizer

    def starting(self, lane: str) -> None:
        """Note that copies are about to be started. If their start fails half-way, it is unknown when they end."""
        self._ends[lane] = _unknown

    def started(self, lane: str, ended: Ended) -> None:
        """Note when the copies of a lane, which runs them in order, have ended."""
        self._ends[lane] = ended

    def close(self) -> None:
        """Unpin the memory once its copies have ended, within END_SECONDS; otherwise keep it, and log why."""
        self._unpin()


def _nothing() -> None:
    pass


def _unknown() -> bool:
    return False


def _unpin(runtime: Any, memory: Tensor, ends: dict[str, Ended]) -> None:
    problem = _wait(ends)
    if not problem:
        status = int(runtime.cudaHostUnregister(memory.data_ptr()))
        problem = f"CUDA could not unpin it (error {status})" if status else ""
    if problem:
        in_use.append(memory)
        Log("host memory").warning(
            "host memory for cached prefixes stays pinned until this process ends",
            reason=problem,
            bytes=memory.nbytes,
        )


def _wait(ends: dict[str, Ended]) -> str:
    """Wait until all copies have ended; return what prevents that."""
    until = time.monotonic() + END_SECONDS
    try:
        while not all(ended() for ended in ends.values()):
            if time.monotonic() > until:
                return f"copies have not ended within {END_SECONDS:.0f} s"
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        return f"the device has failed: {error}"
    return ""
