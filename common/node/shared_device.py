"""The device of a movable node, for which its two halves launch in turn, each from the thread of its main loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

LOOK_SECONDS = 0.1  # between two looks of a half that waits at what the other one has announced


class SharedDevice:
    """A lock to be held while a plan is launched, so that kernels of the two halves never mix.

    A half that waits for it is as silent as the one that has it. So it announces the other one's long work, too: only
    its own thread may use the sockets to its peers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy_until = 0.0  # end of the work that has been announced in this turn
        self._announces: dict[int, Callable[[float], None]] = {}  # thread -> what announces its half's work

    def use_from_here(self, announce: Callable[[float], None]) -> None:
        """Let this thread be the main loop of a half. `announce(seconds)`: it may be silent for so long from now on."""
        self._announces[threading.get_ident()] = announce

    def announce(self, seconds: float) -> None:
        """Announce that this thread may be silent for `seconds`, and so may a half that waits for the device."""
        self._busy_until = self._clock() + seconds
        self._announce(seconds)

    def __enter__(self) -> None:
        announced = 0.0
        while not self._lock.acquire(timeout=LOOK_SECONDS):
            until = self._busy_until
            if until > announced:
                announced = until
                self._announce(until - self._clock())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._busy_until = 0.0
        self._lock.release()

    def _announce(self, seconds: float) -> None:
        announce = self._announces.get(threading.get_ident())
        if announce is not None:
            announce(seconds)
