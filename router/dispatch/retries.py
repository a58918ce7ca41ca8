"""Decides when a request whose attempt failed is placed again: at once, after a pause, or not at all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from common.errors import Moved, NodeLost, Overloaded, Preempted, RequestError

FIRST_PAUSE = 0.05  # seconds between two attempts of one request; doubled each time
MAX_PAUSE = 2.0
FULL_QUEUE_SECONDS = 0.25  # pause before a request is tried again at full queues; doubled each time
LOSSES_PER_ATTEMPT = 3  # nodes that may die under a request that makes progress, per allowed attempt


class Retries:
    """The failures of one request. Pauses are shortened at random, so that requests do not return at the same time."""

    def __init__(
        self,
        max_attempts: int,
        timeout: float,
        deadline: float,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`timeout`: seconds to wait for room in full queues. `deadline`: on the clock of `now`."""
        self._max_attempts = max_attempts
        self._timeout = timeout
        self._deadline = deadline
        self._draw = draw
        self._failures = 0
        self._losses = 0
        self._repeated = False
        self._in_a_row = 0  # consecutive failures without progress; pauses grow with it
        # when the wait for room ends; inf unless the last failure was a full queue
        self._full_until = math.inf
        self._full_pause = FULL_QUEUE_SECONDS
        self._full_queues = 0  # consecutive ones
        self._taken_in = False  # some attempt was not refused for a full queue

    def pause(self, error: RequestError, progress: bool, elsewhere: bool, now: float) -> float | None:
        """Return the seconds until the next attempt; None if `error` ends the request.

        `progress`: the attempt yielded tokens. `elsewhere`: a pair of nodes that has not failed can take the request.
        """
        self._repeated = False
        self._taken_in = self._taken_in or progress or not isinstance(error, Overloaded)
        if isinstance(error, Overloaded):
            pause = self._for_room(elsewhere, now)
        elif isinstance(error, Moved):
            pause = 0.0
        elif error.retryable:
            pause = self._for_failure(error, progress, elsewhere)
        else:
            pause = None
        return None if pause is None or now + pause >= self._deadline else pause

    @property
    def repeated(self) -> bool:
        """True if the request has failed several times in a row for other reasons than the loss of a node.

        That includes full queues of several nodes, but not the pauses in which it waits for room.
        """
        return self._repeated

    def _for_room(self, elsewhere: bool, now: float) -> float | None:
        """Try another node, whose queue may have room. If all are full, a new request is refused.

        A request that some node had accepted before waits instead, and keeps its text so far.
        """
        self._full_queues += 1
        if elsewhere and self._full_queues < self._max_attempts:
            self._repeated = self._full_queues > 1
            return 0.0
        if not self._taken_in:
            return None
        if self._full_until == math.inf:
            self._full_pause = FULL_QUEUE_SECONDS
            self._full_until = now + self._timeout
        pause = self._full_pause * self._draw(0.5, 1.0)
        self._full_pause = min(2 * self._full_pause, MAX_PAUSE)
        return pause if now + pause <= self._full_until else None

    def _for_failure(self, error: RequestError, progress: bool, elsewhere: bool) -> float | None:
        self._full_until = math.inf
        self._full_queues = 0
        self._losses += isinstance(error, NodeLost)
        # An attempt with progress is not a failure: the text and the deadline bound how often this happens.
        got_further = progress and isinstance(error, Preempted | NodeLost)
        self._failures += not got_further
        if self._failures >= self._max_attempts or self._losses >= LOSSES_PER_ATTEMPT * self._max_attempts:
            return None
        self._in_a_row = 0 if got_further else self._in_a_row + 1
        self._repeated = self._in_a_row > 1 and not isinstance(error, NodeLost)
        if self._in_a_row <= 1 and (elsewhere or got_further):
            return 0.0
        grown = FIRST_PAUSE * 2.0 ** min(max(self._in_a_row - 1, 0), 16)
        return min(grown, MAX_PAUSE) * self._draw(0.5, 1.0)
