"""A histogram without locks: one thread observes values, and reports are read in the same thread.

The bounds that nodes and the router have to agree about stand here: a node reports counts only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# Upper bounds in seconds: vLLM's, and three finer ones.
TOKEN_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TRANSFER_BYTES: Final = tuple(2.0**exponent for exponent in range(11, 36, 2))  # 2 KiB to 32 GiB


class Histogram:
    """Counts values by bucket, and sums them up."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: ascending upper bounds, without the infinite one."""
        self.bounds = tuple(map(float, bounds))
        self.counts = [0] * (len(bounds) + 1)  # the last bucket holds what exceeds all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
