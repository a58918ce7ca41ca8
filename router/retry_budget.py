"""Bounds how much of the load is retries, so that a fault that every retry meets again does not become a storm.

Charged are repeated failures: the second and later of one request without progress. Free are

- the first retry of a request: another pair takes it, which hides a broken link or node from its client at the cost of
  one more attempt per request;
- attempts that lost a node: a node with 500 requests moves them all. `router.max_attempts` bounds them per request;
- full queues: a request that was taken in before waits, up to `router.placement_wait`, with pauses that grow. It is
  charged only where it leaves a second full queue in a row for that of a third node at once.
"""

from __future__ import annotations

from collections.abc import Callable

PER_SECOND = 5.0  # retries that are always allowed
BURST = 100.0  # most that may be saved up


class RetryBudget:
    """A token bucket that every request fills by `ratio`."""

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        """`ratio`: retries per request."""
        self._ratio = ratio
        self._clock = clock
        self._tokens = BURST
        self._filled = clock()

    def request(self) -> None:
        """A new request came."""
        self._tokens = min(self._tokens + self._ratio, BURST)

    def take(self) -> bool:
        """Spend one retry; False: there is none left."""
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled) * PER_SECOND, BURST)
        self._filled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
