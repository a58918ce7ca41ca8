"""A limit of reasoning tokens: after so many of them, the marker that ends reasoning is forced."""

from __future__ import annotations

import sys
from typing import NamedTuple

from common.grammar.token_marker import Symbols, SymbolsOf, TokenMarker
from common.messages.generation import ThinkingLimit

# Tokens of an answer that may precede its reasoning, such as blanks. Markers later in the answer are text: a tool call
# may write a file that contains them.
LEAD = 4
NEVER = sys.maxsize


class Place(NamedTuple):
    """The place of an answer with respect to its reasoning."""

    inside: bool
    # Inside: reasoning tokens so far, with those of an incomplete end. Outside: tokens so far, while reasoning may
    # still begin; NEVER: it is over.
    tokens: int
    marker: int = 0  # the place in the marker that is awaited


OVER = Place(False, NEVER)


class ThinkingBudget:
    """Says where an answer is, and which tokens a place forces. It keeps no state: drafts have places of their own."""

    def __init__(self, limit: ThinkingLimit, symbols_of: SymbolsOf) -> None:
        self._limit = limit
        self._symbols_of = symbols_of
        self._begin = TokenMarker(limit.begin, symbols_of)
        self._end = TokenMarker(limit.end, symbols_of)

    @property
    def start(self) -> Place:
        """The place before the first token of the answer."""
        return Place(False, 0) if self._limit.spent is None else Place(True, self._limit.spent)

    def after(self, place: Place, token: int) -> Place:
        """Return the place after one more token."""
        if place == OVER:
            return OVER
        symbols = self._symbols_of(token)
        if place.inside:
            return self._inside(place.tokens + 1, place.marker, symbols)
        marker, rest = self._begin.after(place.marker, symbols)
        if marker == self._begin.complete:
            return self._inside(0, 0, rest)
        tokens = place.tokens + 1
        return Place(False, tokens, marker) if tokens < LEAD + len(self._begin.tokens) else OVER

    def forced(self, place: Place) -> tuple[int, ...]:
        """Return the tokens that must follow, which are the rest of the end of the reasoning; () if any may."""
        return self._end.rest(place.marker) if place.inside and place.tokens >= self._limit.tokens else ()

    def unmasked(self, place: Place) -> int:
        """Return the least number of further tokens after which the end is forced; NEVER if it will not be."""
        if place.inside:
            return max(self._limit.tokens - place.tokens, 0)
        return NEVER if place == OVER else self._limit.tokens + 1

    def _inside(self, tokens: int, marker: int, symbols: Symbols) -> Place:
        marker, _ = self._end.after(marker, symbols)
        return OVER if marker == self._end.complete else Place(True, tokens, marker)
