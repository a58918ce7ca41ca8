"""A limit of reasoning tokens: after so many of them, the marker that ends reasoning is forced."""

from __future__ import annotations

import sys
from typing import NamedTuple

from common.messages.generation import ThinkingLimit

# Tokens of an answer that may precede its reasoning, such as blanks. Markers later in the answer are text: a tool call
# may write a file that contains them.
LEAD = 4
NEVER = sys.maxsize


class Place(NamedTuple):
    """The place of an answer with respect to its reasoning."""

    inside: bool
    # Inside: reasoning tokens so far. Outside: tokens so far, while reasoning may still begin; over LEAD: it is over.
    tokens: int


OVER = Place(False, LEAD + 1)


class ThinkingBudget:
    """Says where an answer is, and which token a place forces. It keeps no state: drafts have places of their own."""

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit = limit
        self.end = limit.end

    @property
    def start(self) -> Place:
        """The place before the first token of the answer."""
        return Place(False, 0) if self._limit.spent is None else Place(True, self._limit.spent)

    def after(self, place: Place, token: int) -> Place:
        """Return the place after one more token."""
        if place.inside:
            return OVER if token == self.end else Place(True, place.tokens + 1)
        if token == self._limit.begin and place.tokens <= LEAD:
            return Place(True, 0)
        return Place(False, min(place.tokens + 1, OVER.tokens))

    def forces(self, place: Place) -> bool:
        """Return whether only `end` may follow."""
        return place.inside and place.tokens >= self._limit.tokens

    def unmasked(self, place: Place) -> int:
        """Return the least number of further tokens after which `end` is forced; NEVER if it will not be."""
        if place.inside:
            return max(self._limit.tokens - place.tokens, 0)
        return NEVER if place == OVER else self._limit.tokens + 1
