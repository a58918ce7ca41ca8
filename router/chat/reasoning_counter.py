"""Counts the tokens of the first reasoning of one answer, from its ids only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from common.grammar.thinking_budget import NEVER, OVER, Place, ThinkingBudget
from common.grammar.token_marker import SymbolsOf
from common.messages.generation import ThinkingLimit


class ReasoningCounter:
    """Counts as SGLang does: the markers around the reasoning are among its tokens."""

    def __init__(self, begin: Sequence[int], end: Sequence[int], symbols_of: SymbolsOf, opened: bool) -> None:
        """`begin` and `end` are the tokens of the markers. `opened`: the prompt ends inside the reasoning."""
        self._budget = _without_limit(tuple(begin), tuple(end), symbols_of)
        self._place = Place(True, 0) if opened else self._budget.start
        self._tokens = 0  # of the answer, up to the end of its reasoning
        self.count = 0

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        before = self._place
        if before == OVER:
            return
        self._place = self._budget.after(before, token)
        self._tokens += 1
        if before.inside or self._place.inside:
            self.count = self._tokens


@lru_cache(maxsize=4)
def _without_limit(begin: tuple[int, ...], end: tuple[int, ...], symbols_of: SymbolsOf) -> ThinkingBudget:
    return ThinkingBudget(ThinkingLimit(NEVER, begin, end), symbols_of)
