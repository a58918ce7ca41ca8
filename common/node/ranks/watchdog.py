"""Ends a node one of whose ranks has ended, is stopped or hangs, so that its requests continue on other nodes.

A rank that fails in a collective is noticed there, by all others. This thread notices it while no collective waits, and
when rank 0 itself waits in one. Like the watchdog of the main loop (loop_watchdog.py) it counts only time in which it
ran itself, so that a node that was stopped as a whole goes on afterwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from common.node.ranks.board import Board, BoardField
from common.observability.logs import Log
from common.process import EXIT_RANK_FAILED

LOOK_SECONDS = 0.1
# For the main thread to end the node by itself, with the better reason, after a collective has failed.
GRACE_SECONDS = 0.3


class RankProcess(Protocol):
    """The part of subprocess.Popen that is used here."""

    def poll(self) -> int | None: ...


def stopped(rank: int) -> str:
    """Return the problem of a rank without a beat."""
    return f"rank {rank} does not run: it is stopped, or its machine is overloaded"


class RankMeter:
    """Counts for how long one rank has shown no sign, in seconds in which the caller itself ran."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seen = -1
        self._seconds = 0.0

    def exceeded(self, sign: int, passed: float) -> bool:
        """Return whether the sign has been the same for too long; never with a limit of 0.

        `passed`: seconds since the last call.
        """
        self._seconds = self._seconds + min(passed, 2 * LOOK_SECONDS) if sign == self._seen else 0.0
        self._seen = sign
        return self._seconds >= self._limit > 0


class RankWatch:
    """Looks at the ranks of a node."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        board: Board,
        overdue: Callable[[], float],
        stopped_limit: float,
        hung_limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch ranks 1 and up.

        Args:
            overdue: seconds by which rank 0's main loop exceeds its announced work; negative while it has time left.
            stopped_limit: seconds without a beat after which a process counts as stopped.
            hung_limit: seconds without a turn of its main loop, past the announced work, after which a rank hangs;
                0: never.
        """
        self._processes = processes
        self._board = board
        self._overdue = overdue
        self._beats = [RankMeter(stopped_limit) for _ in processes]
        self._turns = [RankMeter(hung_limit) for _ in processes]
        self._clock = clock
        self._looked = clock()

    def problem(self) -> str | None:
        """Return why the node has to end; None while all ranks are well."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        for rank, process in enumerate(self._processes, start=1):
            code = process.poll()
            if code is not None:
                return f"rank {rank} has ended with {code}"
            if self._beats[rank - 1].exceeded(self._board.read(rank, BoardField.BEAT), passed):
                return stopped(rank)
            working = self._overdue() < 0
            turns = self._board.read(rank, BoardField.TURNS)
            if self._turns[rank - 1].exceeded(turns, 0.0 if working else passed):
                return f"the main loop of rank {rank} hangs"
        return None


@contextlib.contextmanager
def rank_watchdog(watch: RankWatch, log: Log) -> Iterator[None]:
    """End this process while in the context, once a rank has a problem."""
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(LOOK_SECONDS):
            problem = watch.problem()
            if problem is not None and not stop.wait(GRACE_SECONDS):
                log.error("a rank of this node has failed: the node ends", reason=problem)
                os._exit(EXIT_RANK_FAILED)

    thread = threading.Thread(target=look, name="ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
