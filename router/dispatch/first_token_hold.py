"""Keeps the first token of a stream back for a while, so that the gap before the second one is shorter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A timer of an event loop, from its `call_later`."""

    def cancel(self) -> None:
        """Do not call back any more."""
        ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class FirstTokenHold:
    """Delays the wake-up of the reader for the first token of one attempt; any other wake-up ends the delay."""

    def __init__(self, seconds: float, call_later: CallLater) -> None:
        """`seconds`: the longest hold. `call_later`: the event loop's."""
        self._seconds = seconds
        self._call_later = call_later
        self._timer: Timer | None = None

    def begin(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the time is over, unless `release` comes first. Called once: a hold has one timer."""
        assert self._timer is None
        self._timer = self._call_later(self._seconds, wake)

    def release(self) -> None:
        """End the hold: nothing will be called. Does nothing if it has not begun or its time is over."""
        if self._timer is not None:
            self._timer.cancel()
