"""The steps that verified drafts of one answer, over all its attempts."""

from __future__ import annotations

from array import array
from bisect import bisect_left


class VerifiedSteps:
    """Collects steps in the order of their tokens."""

    def __init__(self) -> None:
        # The places in the answer of the first token of each step, and after its last one.
        self._starts = array("q")
        self._ends = array("q")

    def add(self, start: int, tokens: int) -> None:
        """Add a step of `tokens` tokens; `start` is the place of the first one, past all earlier steps."""
        self._starts.append(start)
        self._ends.append(start + tokens)

    def end(self, tokens: int) -> None:
        """Drop what follows the first `tokens` tokens: a stop string may end an answer in the middle of a step."""
        kept = bisect_left(self._starts, tokens)
        del self._starts[kept:], self._ends[kept:]
        if kept:
            self._ends[-1] = min(self._ends[-1], tokens)

    @property
    def count(self) -> int:
        return len(self._starts)

    @property
    def accept_length(self) -> float | None:
        """The average number of tokens that a step gave; None if there was no step."""
        return (sum(self._ends) - sum(self._starts)) / self.count if self._starts else None
