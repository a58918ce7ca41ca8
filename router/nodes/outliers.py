"""Finds nodes that are far slower than others of their role (gray failures), from measurements on requests.

A node whose seconds per token exceed `FACTOR` times the median of its role for `SUSTAINED` seconds gets a smaller share
of requests, in inverse proportion to its slowness. At most half of a role is treated so, and never a node that is the
only one of its role. A node gets its full share back once it is fast, or when it has no measurements for `STALE`
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

FACTOR = 3.0
RECOVERED = 2.0  # a slow node has recovered below this multiple of the median
SUSTAINED = 3.0  # seconds
STALE = 15.0
MIN_WEIGHT = 0.1
SMOOTHING = 0.1  # weight of one measurement in the moving average
ENOUGH = 5  # measurements that a node needs before it is compared


@dataclass(slots=True)
class _Speed:
    seconds: float  # moving averages of the measured seconds and tokens
    tokens: float
    count: int
    measured: float  # time of the last measurement
    slow_since: float | None = None
    weight: float = 1.0

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


class Outliers:
    """Measured speeds and resulting weights, by incarnation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._speeds: dict[str, _Speed] = {}
        self._slow: set[str] = set()  # nodes with a weight below 1

    def measured(self, incarnation: str, seconds: float, tokens: int) -> None:
        """Record that a request waited `seconds` for `tokens` tokens of this node."""
        if tokens <= 0 or seconds <= 0:
            return
        now = self._clock()
        speed = self._speeds.get(incarnation)
        if speed is None or now - speed.measured > STALE:
            self._speeds[incarnation] = _Speed(seconds, tokens, 1, now)
            return
        speed.seconds += SMOOTHING * (seconds - speed.seconds)
        speed.tokens += SMOOTHING * (tokens - speed.tokens)
        speed.count += 1
        speed.measured = now

    @property
    def none(self) -> bool:
        """True if every node has its full weight."""
        return not self._slow

    def weight(self, incarnation: str) -> float:
        """Return the weight at the last `judge`: 1 unless the node is an outlier."""
        speed = self._speeds.get(incarnation)
        return 1.0 if speed is None else speed.weight

    def seconds_per_token(self, incarnation: str) -> float | None:
        speed = self._speeds.get(incarnation)
        return None if speed is None else speed.per_token

    def judge(self, role: Sequence[str]) -> None:
        """Compare all nodes of one role, given by incarnation."""
        self._compare(role)
        self._slow.difference_update(role)
        self._slow.update(key for key in role if self.weight(key) < 1.0)

    def _compare(self, role: Sequence[str]) -> None:
        now = self._clock()
        known = {
            key: speed
            for key in role
            if (speed := self._speeds.get(key)) is not None
            and speed.count >= ENOUGH
            and now - speed.measured <= STALE
        }
        for key in role:
            if key in self._speeds and key not in known:
                self._speeds[key].slow_since, self._speeds[key].weight = None, 1.0
        if len(known) < 2:
            for speed in known.values():
                speed.slow_since, speed.weight = None, 1.0
            return
        median = median_low(speed.per_token for speed in known.values())
        slowest = sorted(known.values(), key=lambda speed: -speed.per_token)
        for rank, speed in enumerate(slowest):
            bound = RECOVERED if speed.weight < 1.0 else FACTOR
            if rank >= len(role) // 2 or speed.per_token < bound * median:
                speed.slow_since, speed.weight = None, 1.0
                continue
            if speed.slow_since is None:
                speed.slow_since = now
            if now - speed.slow_since >= SUSTAINED:
                speed.weight = max(median / speed.per_token, MIN_WEIGHT)

    def forget(self, incarnation: str) -> None:
        self._speeds.pop(incarnation, None)
        self._slow.discard(incarnation)
