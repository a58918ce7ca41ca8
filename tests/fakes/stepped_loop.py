"""An event loop whose time a test advances: nothing sleeps, and no two runs differ."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from contextvars import Context
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")


class _Steps(selectors.SelectSelector):
    """Advances the time to the next timer instead of waiting, but not past `until`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.until = 1000.0
        self.reached: Callable[[], None] = lambda: None  # called when nothing is left to do before `until`

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self.now + timeout > self.until:
            self.now = self.until
            self.reached()
        elif timeout > 0:
            # Rounded up: the timer is due then.
            self.now = math.nextafter(self.now + timeout, math.inf)
        return []


class SteppedLoop(asyncio.SelectorEventLoop):
    """Runs until nothing is left to do before a given time. Descriptors are numbers that `signal` makes readable.

    Attributes:
        problems: what no task has caught. A test should find it empty.
    """

    def __init__(self) -> None:
        self._steps = _Steps()
        super().__init__(self._steps)
        self._steps.reached = self.stop
        self._readers: dict[int, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, problem: self.problems.append(problem))

    def time(self) -> float:
        return self._steps.now

    @property
    def _clock_resolution(self) -> float:
        """By how much a timer may be early: no more than one step of a float, since the clock stands still."""
        return math.ulp(self._steps.now)

    @_clock_resolution.setter
    def _clock_resolution(self, seconds: float) -> None:
        """Ignore what asyncio knows about the clock of the machine."""

    def run_for(self, seconds: float = 0.0) -> None:
        """Run all that is due until `seconds` from now."""
        self._steps.until = self._steps.now + seconds
        self.run_forever()

    def run_now(self, function: Callable[[], object]) -> None:
        """Call a function that needs a running loop, and run all that is due now."""
        self.call_soon(function)
        self.run_for()

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        self._timers = [*self.timers(), timer]
        return timer

    def timers(self) -> list[asyncio.TimerHandle]:
        """Return the timers that are still to come."""
        return [timer for timer in self._timers if not timer.cancelled() and timer.when() > self.time()]

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        self._readers[fd] = callback, args

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def signal(self, fd: int) -> None:
        """Let the reader of a descriptor know that there is something to read."""
        if fd in self._readers:
            callback, args = self._readers[fd]
            self.call_soon(callback, *args)
