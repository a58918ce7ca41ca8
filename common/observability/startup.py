"""Reports the start-up progress of one process to its parent: JSON lines on an inherited descriptor.

`deploy/up` passes --status-fd and draws bars from it; without it, progress is logged in a few steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from common.observability.logs import Log
from common.observability.start_progress import StartProgress, progressed
from common.observability.start_times import StartTimes
from common.observability.start_watchdog import start_watchdog

Phase = Literal[
    "importing",
    "verifying",
    "connecting",  # waiting until the other ranks of a node have imported as well, and connecting the GPUs
    "loading",
    "allocating",
    "compiling",  # kernels that Triton's cache lacks
    "sizing",  # a trial of graphs, which sizes the pool
    "capturing",
    "warming",  # running and measuring what has no graph
    "registering",
    "ready",
    "failed",
]


LONG: tuple[Phase, ...] = ("verifying", "loading")  # reported repeatedly
# A process that makes progress repeats its last line this often: its supervisor kills one that is silent for long.
REPEAT_SECONDS = 60.0


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line on the descriptor."""

    phase: Phase
    done: int = 0
    total: int = 0
    message: str = ""


class Progressing(Protocol):
    """Takes reports of start-up progress."""

    def report(self, phase: Phase, done: int = 0, total: int = 0) -> None: ...


class StartupReporter:
    """Writes Progress lines; a reader that has exited is ignored, since serving matters more."""

    def __init__(self, descriptor: int | None, log: Log) -> None:
        self._descriptor = descriptor
        self._log = log
        self._last = 0.0
        self._percent = -1
        self._line = b""
        self._writing = threading.Lock()  # the thread of the watchdog writes, too
        self.times = StartTimes()
        self._progress = StartProgress()

    def __enter__(self) -> StartupReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.report("failed", message=str(error))
        self.close()

    def report(self, phase: Phase, done: int = 0, total: int = 0, message: str = "") -> None:
        """Report the phase; repeated lines of LONG phases are limited to ten per second and one per percent.

        So all lines of a start-up fit into the pipe, and a reader that has stopped does not block this process.
        A failure is not logged here: the reason is logged where the process ends, which may be long after its start.
        """
        now = time.monotonic()
        self.times.enter(phase)
        self._progress.enter(phase, done, total)
        if phase in LONG and done < total:
            percent = 100 * done // total
            if now - self._last < 0.1 or percent == self._percent:
                return
            self._percent = percent
        self._last = now
        if phase != "failed" and (phase not in LONG or done == total):
            self._log.info("start-up", phase=phase, done=done, total=total, message=message)
        if phase == "ready":
            self._log.info("start-up took", **self.times.fields())
        # Names of files may contain bytes that are not UTF-8.
        shown = message.encode(errors="backslashreplace").decode()
        line = Progress(phase=phase, done=done, total=total, message=shown)
        self._line = msgspec.json.encode(line) + b"\n"
        self._write()

    def compiled(self, kernel: str, seconds: float) -> None:
        """Count a kernel that was compiled during the start."""
        self.times.add("compilations", seconds)
        progressed(f"compiled {kernel.partition('[')[0]}")

    def watched(self, limit: float) -> contextlib.AbstractContextManager[None]:
        """Return a context that ends this process once its start makes no progress for `limit` seconds; 0: never."""
        return start_watchdog(
            self._progress,
            limit,
            self._log,
            lambda problem: self.report("failed", message=problem),
            self._repeat,
        )

    def _repeat(self) -> None:
        """Show that there is progress although no line has said so for a while."""
        now = time.monotonic()
        if now - self._last >= REPEAT_SECONDS:
            self._last = now
            self._write()

    def _write(self) -> None:
        with self._writing:
            if self._descriptor is None:
                return
            try:
                os.write(self._descriptor, self._line)
            except OSError:
                self._close()

    def close(self) -> None:
        with self._writing:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the number was not a descriptor
                os.close(self._descriptor)
            self._descriptor = None
