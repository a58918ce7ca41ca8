"""Keeps what a starting process last did, so that start_watchdog.py can tell a slow start from one that hangs.

Code far below the composition roots calls `progressed` for each step: a tensor read, a graph captured, a kernel
compiled. Outside a start that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[StartProgress | None] = ContextVar("start_progress", default=None)


def progressed(step: str = "") -> None:
    """Count a step of the start that this context belongs to, if any; "" keeps the name of the step before."""
    progress = _current.get()
    if progress is not None:
        progress.made(step)


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Let the start that this context belongs to, if any, be without progress: the other ranks are watched instead."""
    progress = _current.get()
    if progress is None:
        yield
        return
    progress.waits = True
    try:
        yield
    finally:
        progress.made("")
        progress.waits = False


class StartProgress:
    """Written by the main thread, and read by the thread of the watchdog."""

    def __init__(self) -> None:
        self.steps = 0
        self.waits = False  # for other ranks, which are watched themselves
        self._phase = "importing"
        self._done = self._total = 0
        self._step = ""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let `progressed` and `waiting_for_ranks` speak of this start in this context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def enter(self, phase: str, done: int, total: int) -> None:
        """Begin a phase, or go on with the same."""
        if phase != self._phase:
            self._step = ""
        self._phase, self._done, self._total = phase, done, total
        self.steps += 1

    def made(self, step: str) -> None:
        """Count a step of the phase; "" keeps the name of the step before."""
        self._step = step or self._step
        self.steps += 1

    def __str__(self) -> str:
        """Name the phase, and what was last done in it."""
        share = f" ({self._done} of {self._total})" if self._total else ""
        return f"phase {self._phase}{share}, after: {self._step or 'nothing yet'}"
