"""Restart delays of a process: exponential back-off, reset once the process has stayed up for a while."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY = 0.2  # seconds
MAX_DELAY = 30.0
STABLE_SECONDS = 10.0  # a process that was up this long is not in a crash loop


@dataclass(slots=True)
class Backoff:
    """Computes the delay before each start of one process."""

    failures: int = 0  # consecutive ends without STABLE_SECONDS of being up

    def next_delay(self, seconds_up: float) -> float:
        """Return the delay before the next start of a process that has just ended.

        `seconds_up`: how long it was ready to serve; 0.0 if it never was.
        """
        if seconds_up >= STABLE_SECONDS:
            self.failures = 0
        exponent = min(self.failures, 32)  # avoids overflow
        self.failures += 1
        return min(FIRST_DELAY * 2.0**exponent, MAX_DELAY)
