"""Tokens that a request allows, forbids or forces independently of a grammar.

They are `allowed_token_ids`, `bad_words` and the limit of reasoning tokens, `thinking_token_budget`.

They act like a grammar: every draw is masked, including the first token and each node of a draft tree, and another node
replays the answer before it goes on. If a request has rules and a grammar, a token must satisfy both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from common.errors import RequestError
from common.grammar.grammars import Grammars
from common.grammar.matcher import ALL, Masks, Matcher, mask_width
from common.grammar.nothing_left import GRAMMAR, nothing_left
from common.grammar.thinking_budget import NEVER, OVER, Place, ThinkingBudget
from common.grammar.token_marker import SymbolsOf, by_id
from common.messages.generation import SamplingParams, TokenRules

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Follower(Protocol):
    """Follows one answer and says which tokens may come next. `Matcher` does so for a grammar without other rules."""

    @property
    def failure(self) -> RequestError | None: ...
    @property
    def end_token(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def unmasked(self) -> int:
        """The number of further tokens that are drawn without a mask, whichever they are."""
        ...

    def accept(self, tokens: Sequence[int]) -> bool: ...
    def forced(self, limit: int) -> list[int]: ...
    def fill(self, masks: Masks, row: int) -> None: ...
    def fill_tree(
        self, masks: Masks, first_row: int, tokens: Sequence[int], parents: Sequence[int]
    ) -> None: ...


class PendingFollower(Protocol):
    """A follower that may still have to be compiled; see `GrammarCompilation`."""

    def ready(self, now: float) -> bool: ...
    def matcher(self) -> Follower: ...


class RuleFollower:
    """Follows an answer under rules, and under a grammar if it has one.

    Once an answer has as many reasoning tokens as its limit allows, only the marker that ends reasoning may follow,
    token by token.

    A bad word of several tokens is forbidden by masking its last token where the answer ends with the others, as in
    vLLM. The prompt does not count.
    """

    def __init__(
        self, rules: TokenRules, grammar: Matcher | None, vocab_size: int, symbols_of: SymbolsOf = by_id
    ) -> None:
        """`symbols_of` tells how a token may be part of the markers around reasoning."""
        self._grammar = grammar
        self._rules = rules
        self._budget = None if rules.thinking is None else ThinkingBudget(rules.thinking, symbols_of)
        self._place = OVER if self._budget is None else self._budget.start
        self._always = _allowed(rules, vocab_size)
        # last token of the beginning of a bad word -> (beginning, last token) of each such word
        self._words: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)
        for word in rules.bad_words:
            if len(word) > 1:
                self._words[word[-2]].append((word[:-1], word[-1]))
        self._longest = max((len(word) for word in rules.bad_words), default=1) - 1
        self._said: list[int] = []  # the last tokens of the answer, as many as a word can begin with
        self._empty: RequestError | None = None

    @property
    def failure(self) -> RequestError | None:
        return self._empty or (None if self._grammar is None else self._grammar.failure)

    @property
    def end_token(self) -> int:
        """A token that ends the text; without a grammar any token, since only drafts are padded with it."""
        return 0 if self._grammar is None else self._grammar.end_token

    @property
    def stopped(self) -> bool:
        return self._grammar is not None and self._grammar.stopped

    @property
    def unmasked(self) -> int:
        if self._grammar is not None or self._rules.allowed or self._rules.bad_words:
            return 0
        return NEVER if self._budget is None else self._budget.unmasked(self._place)

    def accept(self, tokens: Sequence[int]) -> bool:
        if self._longest:
            self._said = [*self._said, *tokens][-self._longest :]
        for token in tokens:
            self._place = self._after(self._place, token)
        return self._grammar is None or self._grammar.accept(tokens)

    def forced(self, limit: int) -> list[int]:
        if marker := self._forced(self._place):
            return list(marker[:limit])
        return [] if self._grammar is None else self._grammar.forced(limit)

    def fill(self, masks: Masks, row: int) -> None:
        """Write the mask of a row, as `Matcher.fill` does. Sets `failure` if no token is left."""
        if self._grammar is None:
            masks[row] = ALL
        else:
            self._grammar.fill(masks, row)
        self._apply(masks, row, self._said, self._place)
        self._check(masks, row)

    def fill_tree(self, masks: Masks, first_row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Write the masks of a tree, as `Matcher.fill_tree` does. Sets `failure` if no token is left at the root."""
        if self._grammar is None:
            masks[first_row : first_row + len(tokens)] = ALL
        else:
            self._grammar.fill_tree(masks, first_row, tokens, parents)
        places = [self._place]
        for node in range(len(tokens)):
            if node:
                places.append(self._after(places[parents[node]], tokens[node]))
            path, at = list[int](), node
            while at > 0 and len(path) < self._longest:
                path.append(tokens[at])
                at = parents[at]
            said = [*self._said, *reversed(path)] if self._words else []
            self._apply(masks, first_row + node, said, places[node])
        self._check(masks, first_row)

    def _after(self, place: Place, token: int) -> Place:
        return place if self._budget is None else self._budget.after(place, token)

    def _forced(self, place: Place) -> tuple[int, ...]:
        return () if self._budget is None else self._budget.forced(place)

    def _apply(self, masks: Masks, row: int, said: Sequence[int], place: Place) -> None:
        """Forbid what the rules forbid after an answer that ends with `said`, in this place."""
        masks[row] &= self._always
        for begin, last in self._words.get(said[-1], ()) if said else ():
            if tuple(said[-len(begin) :]) == begin:
                masks[row, last // 32] &= ~_bit(last)
        if marker := self._forced(place):
            left = masks[row, marker[0] // 32] & _bit(marker[0])
            masks[row] = 0
            masks[row, marker[0] // 32] = left

    def _check(self, masks: Masks, row: int) -> None:
        if self.failure is None and not masks[row].any():
            masks[row] = ALL
            self._empty = nothing_left({**forbidding(self._rules), GRAMMAR: self._grammar is not None})


class _Ready:
    """Rules without a grammar: nothing is compiled."""

    def __init__(self, follower: RuleFollower) -> None:
        self._follower = follower

    def ready(self, now: float) -> bool:
        return True

    def matcher(self) -> RuleFollower:
        return self._follower


class _WithRules:
    """Rules beside a grammar that is being compiled."""

    def __init__(
        self, compilation: PendingFollower, rules: TokenRules, vocab_size: int, symbols_of: SymbolsOf
    ) -> None:
        self._compilation = compilation
        self._rules = rules
        self._vocab_size = vocab_size
        self._symbols_of = symbols_of

    def ready(self, now: float) -> bool:
        return self._compilation.ready(now)

    def matcher(self) -> RuleFollower:
        matcher = self._compilation.matcher()
        assert isinstance(matcher, Matcher)
        return RuleFollower(self._rules, matcher, self._vocab_size, self._symbols_of)


def constraint_of(
    sampling: SamplingParams, grammars: Grammars, vocab_size: int, clock: Callable[[], float]
) -> PendingFollower | None:
    """Begin to prepare what masks the tokens of a request; None if nothing does. Raises RequestError."""
    compilation = grammars.start(sampling.grammar, clock) if sampling.grammar else None
    rules = sampling.token_rules
    if rules is None:
        return compilation
    if compilation is None:
        return _Ready(RuleFollower(rules, None, vocab_size, grammars.symbols_of))
    return _WithRules(compilation, rules, vocab_size, grammars.symbols_of)


def forbidding(rules: TokenRules | None) -> dict[str, bool]:
    """Say which fields that lead to rules forbid tokens; see `nothing_left`."""
    if rules is None:
        return {}
    return {
        "allowed_token_ids": bool(rules.allowed),
        "bad_words": bool(rules.bad_words),
        "thinking_token_budget": rules.thinking is not None,
    }


def _allowed(rules: TokenRules, vocab_size: int) -> Words:
    """Return the mask of the tokens that the rules allow after any text."""
    allowed = np.full(32 * mask_width(vocab_size), not rules.allowed, dtype=np.bool_)
    allowed[list(rules.allowed)] = True
    allowed[[word[0] for word in rules.bad_words if len(word) == 1]] = False
    allowed[vocab_size:] = False
    words: Words = np.packbits(allowed, bitorder="little").view(np.int32)
    return words


def _bit(token: int) -> np.int32:
    bit = token % 32
    return np.int32(1 << bit if bit < 31 else -(1 << 31))
