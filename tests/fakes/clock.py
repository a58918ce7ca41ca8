"""A clock that the test advances."""

from __future__ import annotations


class Clock:
    """Monotonic seconds; call it to read the time."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
