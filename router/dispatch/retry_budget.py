"""Bounds the share of retries in the load, so that a persistent fault does not become a retry storm.

Only repeated failures are charged: the second and later ones of one request without progress. These are free:

- the first retry of a request: another pair takes it, which hides a broken link or node from the client at the cost of
  one more attempt per request;
- attempts that lost a node: a node with 500 requests moves them all. `router.max_attempts` bounds them per request;
- full queues: a request that was accepted before waits for up to `router.placement_wait`, with growing pauses. It is
  charged only if it moves from a second full queue in a row directly to a third node.
"""

from __future__ import annotations

from collections.abc import Callable

PER_SECOND = 5.0  # retries that are always allowed
BURST = 100.0  # the most retries that can be saved up


class RetryBudget:
    """A token bucket to which every request adds `ratio`."""

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        """`ratio`: allowed retries per request."""
        self._ratio = ratio
        self._clock = clock
        self._tokens = BURST
        self._filled = clock()

    def request(self) -> None:
        """Count a new request."""
        self._tokens = min(self._tokens + self._ratio, BURST)

    def take(self) -> bool:
        """Spend one retry; return False if none is left."""
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._filled) * PER_SECOND, BURST)
        self._filled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
