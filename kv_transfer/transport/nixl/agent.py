"""The NIXL calls that the nixl transport needs: one agent over UCX, registered memory, prepared lists, transfers.

NIXL's listen thread stays off (it binds every interface; Hello carries the metadata instead), and so does its
progress thread (it spins): `ProgressThread` drives UCX in its place, more often while transfers are running. Tests
replace the installed library by another one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import ConfigError
from kv_transfer.transport.base import Memory, WriteState

_BACKEND: Final = "UCX"
_OWN: Final = "NIXL_INIT_AGENT"  # NIXL's name for a prepared list of own memory
_BUSY_SECONDS: Final = 0.0005  # between two calls of progress
_IDLE_SECONDS: Final = 0.05

Kind = Literal["DRAM", "VRAM"]


class NixlError(Exception):
    """A call that NIXL refused and that posted nothing."""


class MemorySpan(NamedTuple):
    """Contiguous memory of one process; `device` is its CUDA ordinal in that process, 0 for host memory."""

    address: int
    nbytes: int
    device: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` consecutive pieces of `nbytes` bytes each."""

    address: int
    nbytes: int
    count: int


@dataclass(slots=True, eq=False)
class PostedTransfer:
    """One posted transfer."""

    handle: Any
    fault: str = ""  # why it failed


def load_library() -> Any:
    """Return the installed NIXL, preferably for torch's CUDA version. Raises ConfigError if there is none."""
    wanted = [load_cu13, load_cu12]
    if str(torch.version.cuda).startswith("12."):
        wanted.reverse()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read at import, like UCX_ERROR_SIGNALS
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")  # leaves crashes to the interpreter's own handler
    found: list[str] = []
    for load in wanted:
        try:
            return load()
        except ImportError as error:
            found.append(str(error))
    raise ConfigError(
        "transfer.transport",
        "nixl is not installed here: run `pip install -e '.[nixl]'` in the checkout on every host of a node, with the "
        f"pip of its .venv (nixl-cu12 for a torch with CUDA 12), or choose another transport ({'; '.join(found)})",
    )


def load_cu13() -> Any:
    # Imported here because it takes half a second and other transports do not need it.
    import nixl_cu13  # type: ignore[import-not-found, unused-ignore]

    return nixl_cu13


def load_cu12() -> Any:
    import nixl_cu12  # type: ignore[import-not-found, unused-ignore]

    return nixl_cu12


def span_of(memory: Memory) -> MemorySpan:
    """Return the span of a pool; valid while the memory lives."""
    if isinstance(memory, memoryview):
        return MemorySpan(int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), memory.nbytes, 0, "DRAM")
    return MemorySpan(memory.address, memory.nbytes, memory.device, "VRAM")


class NixlAgent:
    """One NIXL agent. Any thread may call it; calls exclude each other."""

    def __init__(self, name: str, devices: str, library: Any = None) -> None:
        """`name` identifies the agent to its peers; `devices` is the value of UCX_NET_DEVICES.

        Raises ConfigError if NIXL is not installed, or UCX does not start on these devices.
        """
        os.environ["UCX_NET_DEVICES"] = devices
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        library = load_library() if library is None else library
        config = library.nixl_agent_config(
            enable_prog_thread=False,
            enable_listen_thread=False,
            backends=[_BACKEND],
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent = library.nixl_agent(name, config)
        except Exception as error:
            raise ConfigError(
                "transfer.nixl_devices", f"NIXL does not start over UCX on {devices!r}: {_text(error)}"
            ) from None
        if _BACKEND not in self._agent.backends:
            raise ConfigError("transfer.transport", "the installed nixl has no UCX plugin")
        self._registered: list[Any] = []

    # ---- own memory

    def register(self, span: MemorySpan) -> None:
        """Register memory. Raises ConfigError if it cannot be pinned."""
        try:
            self._registered.append(
                self._agent.register_memory(
                    [(span.address, span.nbytes, span.device, "")], span.kind, backends=[_BACKEND]
                )
            )
        except Exception as error:
            raise ConfigError(
                "", f"{span.nbytes >> 20} MiB of memory cannot be registered with UCX: {_text(error)}"
            ) from None

    def metadata(self) -> bytes:
        """Return the metadata by which another agent reaches the memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def close(self) -> None:
        """Deregister all memory. No transfer may be running."""
        for registered in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(registered, backends=[_BACKEND])
        self._registered.clear()

    # ---- other agents

    def add(self, metadata: bytes) -> str:
        """Add the agent of this metadata and return its name. Raises NixlError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise NixlError(_text(error)) from None
        return name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)

    def connect(self, name: str) -> None:
        """Start to connect, which shortens the wait of the first write."""
        with contextlib.suppress(Exception):  # the first write reports the error
            self._agent.make_connection(name, backends=[_BACKEND])

    def remove(self, name: str) -> None:
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(name)

    # ---- transfers

    def prepare(self, name: str, rows: Sequence[Rows], span: MemorySpan) -> Any:
        """Prepare a list of pieces of own memory (name "") or of another agent's.

        Raises NixlError if not registered.
        """
        table = np.array(
            [(row.address, row.nbytes, span.device, row.nbytes, row.count) for row in rows], dtype=np.uint64
        )
        try:
            return self._agent.prep_xfer_dlist(name or _OWN, table, span.kind, backends=[_BACKEND])
        except Exception as error:
            raise NixlError(_text(error)) from None

    def forget(self, prepared: Any) -> None:
        with contextlib.suppress(Exception):
            self._agent.release_dlist_handle(prepared)

    def write(
        self, ours: Any, from_: NDArray[np.int32], theirs: Any, to: NDArray[np.int32]
    ) -> PostedTransfer:
        """Start writing pieces `from_` of one list to pieces `to` of another. Raises NixlError."""
        try:
            handle = self._agent.make_prepped_xfer("WRITE", ours, from_, theirs, to, backends=[_BACKEND])
        except Exception as error:
            raise NixlError(_text(error)) from None
        operation = PostedTransfer(handle)
        try:
            if self._agent.transfer(handle) == "ERR":
                operation.fault = "NIXL reports an error"
        except Exception as error:
            operation.fault = _text(error)
        return operation

    def state(self, operation: PostedTransfer) -> WriteState:
        """Return the state of a transfer.

        FAILED means that it will not complete; pieces may land for a moment yet.
        """
        if operation.fault:
            return WriteState.FAILED
        try:
            state = self._agent.check_xfer_state(operation.handle)
        except Exception as error:
            operation.fault = _text(error)
            return WriteState.FAILED
        if state == "PROC":
            return WriteState.PENDING
        if state != "DONE":
            operation.fault = "NIXL reports an error"
            return WriteState.FAILED
        return WriteState.DONE

    def release(self, operation: PostedTransfer) -> None:
        """Release the handle of a transfer that is no longer running."""
        with contextlib.suppress(Exception):
            self._agent.release_xfer_handle(operation.handle)

    def progress(self) -> None:
        """Let UCX do pending work: needed if the network hardware does not write into memory by itself."""
        with contextlib.suppress(Exception):
            self._agent.get_new_notifs(backends=[_BACKEND])


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


class ProgressThread:
    """A thread that calls `turn`: every half millisecond while busy, else every 50 ms."""

    def __init__(self, turn: Callable[[], None], device: int | None = None) -> None:
        """`device` is the CUDA ordinal of the memory that is written or read."""
        self._turn = turn
        self._device = device
        self._busy = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def busy(self, busy: bool) -> None:
        if busy:
            self._busy.set()
        else:
            self._busy.clear()

    @property
    def is_busy(self) -> bool:
        return self._busy.is_set()

    def close(self) -> None:
        self._closing.set()
        self._busy.set()
        self._thread.join()

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while not self._closing.is_set():
            self._turn()
            if self._busy.is_set():
                self._closing.wait(_BUSY_SECONDS)
            else:
                self._busy.wait(_IDLE_SECONDS)
