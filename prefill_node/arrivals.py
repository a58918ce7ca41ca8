"""Remembers which prompts arrived recently: a long prompt is cut only if shorter ones are likely to pass it."""

from __future__ import annotations

from collections import deque

KEPT = 64  # prompts
WINDOW = 10.0  # seconds
MIN_SECONDS = 1.0  # seconds over which a burst counts at least


class RecentArrivals:
    """The lengths and times of the latest prompts."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=KEPT)  # monotonic seconds, tokens

    def add(self, tokens: int, now: float) -> None:
        """Note a prompt that has arrived, and how many tokens of it must be computed."""
        self._arrivals.append((now, tokens))

    def shorter_per_ms(self, tokens: int, now: float) -> float:
        """Return how many prompts of less than `tokens` arrive per millisecond."""
        if not self._arrivals:
            return 0.0
        oldest = self._arrivals[0][0] if len(self._arrivals) == KEPT else now - WINDOW
        begin = max(oldest, now - WINDOW)
        count = sum(length < tokens for at, length in self._arrivals if at >= begin)
        return count / (1e3 * max(now - begin, MIN_SECONDS))
