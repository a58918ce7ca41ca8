"""The steps that verified drafts of one answer, over all its attempts."""

from __future__ import annotations

from array import array
from bisect import bisect_left


class VerifiedSteps:
    """Collects steps in the order of their tokens. An answer may end before the last of them, at a stop string."""

    def __init__(self) -> None:
        # The places in the answer of the first token of each step, and after its last one.
        self._starts = array("q")
        self._ends = array("q")

    def add(self, start: int, tokens: int) -> None:
        """Add a step. `start`: the place of its first token, after those of the steps before."""
        self._starts.append(start)
        self._ends.append(start + tokens)

    def among(self, tokens: int) -> tuple[int, int]:
        """Return how many steps gave some of the first `tokens` tokens of the answer, and how many of these."""
        steps = bisect_left(self._starts, tokens)
        given = sum(self._ends[:steps]) - sum(self._starts[:steps])
        return steps, given - (max(self._ends[steps - 1] - tokens, 0) if steps else 0)
