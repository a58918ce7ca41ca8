"""Ends a node whose main loop hangs, so that its supervisor (deploy/up, systemd, Kubernetes) starts it again.

By then the router has long given up such a node, and its requests run elsewhere. What remains is a process that holds
memory and a GPU. A thread checks by how much the loop exceeds the work that it announced. When that takes too long,
the thread writes the stacks of all threads to stderr and ends the process with EXIT_HUNG.

Python threads cannot run while native code holds the interpreter lock, so the thread could not notice a deadlock
there. In that case a timer of faulthandler, which needs no lock, ends the process after HELD_FACTOR times as long. It
cannot distinguish a held lock from a stopped process: one that was stopped for that long may end when it continues.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator

from common.observability.logs import Log

EXIT_HUNG = 3
LOOK_SECONDS = 0.25
HELD_FACTOR = 4
LAST_WORDS_SECONDS = 5.0  # for stacks and a log line, since a hung loop may hold the lock that logging needs


class HangMeter:
    """Counts for how long a main loop has hung.

    Only time in which the caller itself ran counts: after a SIGSTOP the loop gets a chance to continue.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._looked_at = now
        self.seconds = 0.0

    def exceeded(self, now: float, overdue: float) -> bool:
        """Return whether the limit is exceeded. Called every LOOK_SECONDS.

        `overdue` is the number of seconds past the announced work, not positive while there is time.
        """
        passed = min(now - self._looked_at, 2 * LOOK_SECONDS)
        self._looked_at = now
        self.seconds = max(0.0, min(self.seconds + passed, overdue))
        return self.seconds >= self._limit


@contextlib.contextmanager
def loop_watchdog(overdue: Callable[[], float], limit: float, log: Log) -> Iterator[None]:
    """End the process in this context once `overdue()` has exceeded `limit` seconds; 0: never."""
    if not limit:
        yield
        return
    stop = threading.Event()
    end_later(HELD_FACTOR * limit)
    watcher = threading.Thread(target=_watch, args=(stop, overdue, limit, log), name="watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        faulthandler.cancel_dump_traceback_later()


def _watch(stop: threading.Event, overdue: Callable[[], float], limit: float, log: Log) -> None:
    meter = HangMeter(limit, time.monotonic())
    while not stop.wait(LOOK_SECONDS):
        late = overdue()
        if meter.exceeded(time.monotonic(), late):
            _end(meter.seconds, log)
        # The delay allows for the announced work, which may hold the lock.
        end_later(HELD_FACTOR * limit - min(late, 0.0))


def _end(seconds: float, log: Log) -> None:
    end_later(LAST_WORDS_SECONDS)
    faulthandler.dump_traceback(all_threads=True)
    log.error("the main loop hangs: the process ends itself", seconds_past_announced_work=round(seconds, 1))
    os._exit(EXIT_HUNG)


def end_later(seconds: float) -> None:
    """End this process with exit code 1 and the stacks of all threads after `seconds`, unless called again before."""
    with contextlib.suppress(RuntimeError):  # no thread can be started; the earlier timer stays
        faulthandler.dump_traceback_later(seconds, exit=True)
