"""Ends a process that makes no progress while it starts, with an error that names the phase and what it last did.

Progress is a step (start_progress.py), an imported module, or memory that the kernel fills: pages of a file that a
slow disk delivers, or of a large allocation. A step alone may take long, such as the compilation of a kernel, so the
limit is generous; the whole start has none. As in loop_watchdog.py only time counts in which the process ran, and a
timer that needs no interpreter lock ends a process whose native code holds it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator

from common.observability.logs import Log
from common.observability.loop_watchdog import EXIT_HUNG, HELD_FACTOR, LAST_WORDS_SECONDS, end_later
from common.observability.start_progress import StartProgress

LOOK_SECONDS = 0.25
JOIN_SECONDS = 5.0
# Faults in this time count as progress if there are many: a process that hangs has a few as well.
WINDOW_SECONDS = 10.0
MANY_READ = 4  # faults that read from a disk, each some 128 KiB
MANY_FILLED = 512  # of 4 KiB, or of 2 MiB each

Faults = Callable[[], tuple[int, int]]


def own_faults() -> tuple[int, int]:
    """Return how many page faults of this process have read from a disk, and how many have not."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt


class MemoryFilling:
    """Counts the windows of time in which the kernel has filled much memory of this process."""

    def __init__(self, now: float, faults: Faults = own_faults) -> None:
        self._faults = faults
        self._since = now
        self._read, self._filled = faults()
        self._windows = 0

    def windows(self, now: float) -> int:
        if now - self._since >= WINDOW_SECONDS:
            read, filled = self._faults()
            self._windows += read - self._read >= MANY_READ or filled - self._filled >= MANY_FILLED
            self._since, self._read, self._filled = now, read, filled
        return self._windows


class StartMeter:
    """Counts for how long a start has made no progress, in seconds in which the process itself ran."""

    def __init__(
        self, progress: StartProgress, limit: float, now: float, faults: Faults = own_faults
    ) -> None:
        """`limit`: seconds without progress, 0: without end."""
        self._progress = progress
        self._limit = limit
        self._filling = MemoryFilling(now, faults)
        self._seen = (-1, 0, 0)
        self._looked = now
        self._seconds = 0.0

    def update(self, now: float) -> bool:
        """Return whether there was progress since the last call. Called every LOOK_SECONDS."""
        passed, self._looked = now - self._looked, now
        seen = self._progress.steps, len(sys.modules), self._filling.windows(now)
        progressed, self._seen = seen != self._seen, seen
        if progressed or self._progress.waits:
            self._seconds = 0.0
        else:
            self._seconds += min(passed, 2 * LOOK_SECONDS)
        return progressed

    def problem(self) -> str | None:
        """Return why the process has to end; None while it has time left."""
        if not self._limit or self._seconds < self._limit:
            return None
        return (
            f"no progress of the start for {self._limit:g} s, in {self._progress}; the stacks of all threads are in "
            "the log; raise health.start_hang_timeout if one step takes longer here"
        )


@contextlib.contextmanager
def start_watchdog(
    progress: StartProgress,
    limit: float,
    log: Log,
    tell: Callable[[str], None],
    show: Callable[[], None],
) -> Iterator[None]:
    """End this process with EXIT_HUNG once it has made no progress in this context for `limit` seconds; 0: never.

    Args:
        tell: tells whoever started this process why it ends.
        show: is called after progress, at most once per LOOK_SECONDS. Both are called by a thread of this context.
    """
    stop = threading.Event()

    def watch() -> None:
        meter = StartMeter(progress, limit, time.monotonic())
        while not stop.wait(LOOK_SECONDS):
            if meter.update(time.monotonic()):
                show()
            problem = meter.problem()
            if problem is not None:
                _end(problem, log, tell)
            hold_off()

    def hold_off() -> None:
        if limit:
            end_later(HELD_FACTOR * limit)

    hold_off()
    thread = threading.Thread(target=watch, name="start-watchdog", daemon=True)
    thread.start()
    try:
        with progress.current():
            yield
    finally:
        stop.set()
        thread.join(JOIN_SECONDS)
        faulthandler.cancel_dump_traceback_later()


def _end(problem: str, log: Log, tell: Callable[[str], None]) -> None:
    end_later(LAST_WORDS_SECONDS)
    faulthandler.dump_traceback(all_threads=True)
    log.error("the start hangs: the process ends itself", reason=problem)
    tell(problem)
    os._exit(EXIT_HUNG)
