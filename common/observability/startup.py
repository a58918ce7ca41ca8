"""Reports the start-up progress of one process to its parent: JSON lines on an inherited descriptor.

`deploy/up` passes --status-fd and draws bars from it; without it, progress is logged in a few steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from types import TracebackType
from typing import Literal, Protocol

import msgspec

from common.observability.logs import Log
from common.observability.start_times import StartTimes

Phase = Literal[
    "importing",
    "verifying",
    "connecting",  # waiting until the other ranks of a node have imported as well, and connecting the GPUs
    "loading",
    "allocating",
    "sizing",  # a trial of graphs, which sizes the pool
    "capturing",
    "warming",  # running and measuring what has no graph
    "registering",
    "ready",
    "failed",
]


LONG: tuple[Phase, ...] = ("verifying", "loading")  # reported repeatedly


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One line on the descriptor."""

    phase: Phase
    done: int = 0
    total: int = 0
    message: str = ""


class Progressing(Protocol):
    """Takes reports of start-up progress."""

    def report(self, phase: Phase, done: int = 0, total: int = 0, message: str = "") -> None: ...


class StartupReporter:
    """Writes Progress lines; a reader that has exited is ignored, since serving matters more."""

    def __init__(self, descriptor: int | None, log: Log) -> None:
        self._descriptor = descriptor
        self._log = log
        self._last = 0.0
        self._percent = -1
        self.times = StartTimes()

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
        """
        now = time.monotonic()
        self.times.enter(phase)
        if phase in LONG and done < total:
            percent = 100 * done // total
            if now - self._last < 0.1 or percent == self._percent:
                return
            self._percent = percent
        self._last = now
        if phase not in LONG or done == total:
            self._log.info("start-up", phase=phase, done=done, total=total, message=message)
        if phase == "ready":
            self._log.info("start-up took", **self.times.fields())
        if self._descriptor is None:
            return
        line = msgspec.json.encode(Progress(phase=phase, done=done, total=total, message=message)) + b"\n"
        try:
            os.write(self._descriptor, line)
        except OSError:
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the number was not a descriptor
                os.close(self._descriptor)
            self._descriptor = None
