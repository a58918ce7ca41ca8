"""Determines when a handoff record was sent and seen, for the timeline of its request."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

MAX_DELAY = 10.0  # seconds; a longer one comes from clocks that differ


class RecordTimes(NamedTuple):
    """Times of one record on the receiver's clock."""

    sent: float  # as late as `seen` if the clocks of the two hosts differ by more than the delay
    seen: float


NO_TIMES = RecordTimes(0.0, 0.0)  # before it was seen


def sending_time() -> float:
    """Return the time to send with a record: Unix seconds, since monotonic clocks of two hosts have no common zero."""
    return time.time()


def record_times(sent_at: float, now: float) -> RecordTimes:
    """Return the times of a record that was just seen, at `now` on the receiver's clock. `sent_at` may be anything."""
    delay = time.time() - sent_at
    if not (math.isfinite(delay) and 0.0 <= delay <= MAX_DELAY):
        delay = 0.0
    return RecordTimes(now - delay, now)
