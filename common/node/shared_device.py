"""The device of a movable node, for which its two halves launch in turn, each from the thread of its main loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple

LOOK_SECONDS = 0.1  # between two looks of a half that waits at what the other one has announced


class _Launches(NamedTuple):
    """The launches of one half: those that run, and one that is about to begin."""

    until: float  # when it will have ended
    seconds: float  # that it takes


NOTHING: Final = _Launches(0.0, 0.0)


class SharedDevice:
    """A lock to be held while a plan is launched, so that kernels of the two halves never mix.

    A half that waits for it, or for the device to come to its own launches, is as silent as the one that is served. So
    it announces the other one's long work, too: only its own thread may use the sockets to its peers. Implements
    `OtherLaunches`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy_until = 0.0  # end of the work that has been announced in this turn
        self._launches: dict[int, _Launches] = {}  # thread -> what its half has in flight
        self._announces: dict[int, Callable[[float], None]] = {}  # thread -> what announces its half's work

    def use_from_here(self, announce: Callable[[float], None]) -> None:
        """Let this thread be the main loop of a half. `announce(seconds)`: it may be silent for so long from now on."""
        self._launches[threading.get_ident()] = NOTHING
        self._announces[threading.get_ident()] = announce

    def announce(self, seconds: float) -> None:
        """Announce that this thread may be silent for `seconds`, and so may a half that waits for the device."""
        self._busy_until = self._clock() + seconds
        self._announce(seconds)

    def note(self, seconds: float) -> float:
        """Note that what this thread has launched, or is about to, may take `seconds` from now on.

        Returns the seconds that what the other half has launched may take.
        """
        if threading.get_ident() in self._launches:
            self._launches[threading.get_ident()] = _Launches(self._clock() + seconds, seconds)
        return max(self._end_of_others() - self._clock(), 0.0)

    def __enter__(self) -> None:
        announced = 0.0
        while not self._lock.acquire(timeout=LOOK_SECONDS):
            now, until = self._clock(), max(self._busy_until, self._end_of_others())
            # Work that is late would take its delay from what this half has announced for its own launches.
            if until > max(announced, now):
                announced = until
                own = self._launches.get(threading.get_ident(), NOTHING)
                self._announce(until - now + own.seconds)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy_until = 0.0
        self._lock.release()

    def _end_of_others(self) -> float:
        me, end = threading.get_ident(), 0.0
        for thread, launches in list(self._launches.items()):
            if thread != me and launches.seconds:
                end = max(end, launches.until)
        return end

    def _announce(self, seconds: float) -> None:
        announce = self._announces.get(threading.get_ident())
        if announce is not None:
            announce(seconds)
