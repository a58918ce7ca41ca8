"""Learns how long a step of a decode node takes, by the number of requests in it."""

from __future__ import annotations

from typing import NamedTuple

KEPT = 0.998  # share of its weight that a measurement keeps when another one arrives
MAX_MS = 60_000.0  # longer ones count as this: one node must not spoil the line of all
# A further request costs something, whatever was measured, so that equal nodes share the load.
MIN_SLOPE_MS = 0.02


class StepTime(NamedTuple):
    """Milliseconds of a step with n requests: fixed + n * each."""

    fixed: float
    each: float

    def ms(self, requests: float) -> float:
        return self.fixed + requests * self.each


UNMEASURED = StepTime(10.0, 0.1)


class MeasuredSteps:
    """A line through the steps of all decode nodes, fitted by least squares; recent ones count more.

    All nodes share one line: with one for each, noise would decide between nodes that are alike. A node that is
    slower than the others gets a smaller weight (outliers.py).
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        # The line as it was assumed before the first measurement, with the weight of a few.
        for requests in (1, 64):
            self._add(requests, UNMEASURED.ms(requests))
        self._time: StepTime | None = None

    def measured(self, requests: int, ms: float) -> None:
        """Record that a step with this many requests took `ms`."""
        if ms > 0:
            self._add(requests, min(ms, MAX_MS))
            self._time = None

    @property
    def time(self) -> StepTime:
        """The fitted line."""
        if self._time is None:
            self._time = self._fit()
        return self._time

    def _add(self, x: float, y: float) -> None:
        self._weight = KEPT * self._weight + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y

    def _fit(self) -> StepTime:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        together = self._xy / self._weight - mean_x * mean_y
        each = max(together / spread if spread > 1e-9 else 0.0, MIN_SLOPE_MS)
        return StepTime(max(mean_y - each * mean_x, 0.0), each)
