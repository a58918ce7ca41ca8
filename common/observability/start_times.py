"""Measures where the time of a process's start-up goes, for the log and for /server_info."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from common.process_entry import entry


def process_age() -> float:
    """Return the seconds since this process began, before its first import."""
    began = entry(os.getpid()).started / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)


_current: ContextVar[StartTimes | None] = ContextVar("start_times", default=None)


def count(part: str, seconds: float) -> None:
    """Count work in the start-up that this context belongs to, if any; see `StartTimes.add`."""
    times = _current.get()
    if times is not None:
        times.add(part, seconds)


class StartTimes:
    """Adds up the seconds of the phases of a start, which follow one another, and of the work within phases.

    A phase that occurs again, such as in both halves of a movable node, is counted once, with all of its seconds.
    """

    def __init__(self) -> None:
        self._phase = "importing"
        self._since = time.monotonic() - process_age()
        self._phases: dict[str, float] = {}
        self._parts: dict[str, tuple[int, float]] = {}  # how often, and the seconds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Let `count` add to these times in this context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another, or go on with the same."""
        now = time.monotonic()
        self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def add(self, part: str, seconds: float) -> None:
        """Count work that is done during phases, such as the compilation of a kernel."""
        count, before = self._parts.get(part, (0, 0.0))
        self._parts[part] = count + 1, before + seconds

    def fields(self) -> dict[str, str | float]:
        """Return the seconds of all phases up to now, and in total; work within them also says how often it was done.

        Names begin with `start_`, as the fields of a node in /server_info.
        """
        self.enter(self._phase)
        phases = {name: round(seconds, 2) for name, seconds in self._phases.items() if seconds >= 0.005}
        found: dict[str, str | float] = {f"start_{name}_s": seconds for name, seconds in phases.items()}
        for name, (count, seconds) in self._parts.items():
            found[f"start_{name}"] = f"{count} in {seconds:.2f} s"
        return {**found, "start_s": round(sum(self._phases.values()), 2)}
