"""When a process that ended is started again: exponential back-off, reset by a process that stayed up."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY = 0.2  # seconds
MAX_DELAY = 30.0
STABLE_SECONDS = 10.0  # a process that was up for so long does not crash in a loop


@dataclass(slots=True)
class Backoff:
    """Delays before the starts of one process."""

    failures: int = 0  # ends in a row without STABLE_SECONDS of being up

    def next_delay(self, seconds_up: float) -> float:
        """Return the delay before the next start of a process that has just ended.

        `seconds_up`: how long it was ready to serve, 0.0 if it never was.
        """
        if seconds_up >= STABLE_SECONDS:
            self.failures = 0
        exponent = min(self.failures, 32)  # keeps the power finite
        self.failures += 1
        return min(FIRST_DELAY * 2.0**exponent, MAX_DELAY)
