"""The number of tokens after a marker, for any way in which a text and its markers are split into tokens."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from common.grammar.token_marker import Symbols, TokenMarker, by_id


def tokens_since(marker: Symbols, tokens: Sequence[int], symbols_of: Callable[[int], Symbols]) -> int | None:
    """As `TokenMarker.tokens_since`: tries each token from the last one on."""
    sought = list(marker)
    for count in range(len(tokens)):
        before = [symbol for token in tokens[: len(tokens) - count - 1] for symbol in symbols_of(token)]
        text = [*before, *symbols_of(tokens[len(tokens) - count - 1])]
        if any(text[end - len(sought) : end] == sought for end in range(len(before) + 1, len(text) + 1)):
            return count
    return None


@pytest.mark.parametrize("kind", ["ids", "bytes", "both"])
def test_tokens_that_follow_the_last_marker(kind: str) -> None:
    rng, found = random.Random(kind), 0
    for _ in range(3000):
        vocabulary: list[Symbols] = [
            bytes(rng.choices(b"ab>", k=rng.randint(1, 3)))
            if rng.random() < 0.7 or kind == "bytes"
            else by_id(token)
            for token in range(7)
        ]
        symbols_of = by_id if kind == "ids" else vocabulary.__getitem__
        marker = rng.choices(range(7), k=rng.randint(1, 3))
        tokens = array("i", rng.choices(range(7), k=rng.randint(0, 12)))
        spelled = [symbol for token in marker for symbol in symbols_of(token)]
        expected = tokens_since(spelled, tokens, symbols_of)
        assert TokenMarker(marker, symbols_of).tokens_since(tokens) == expected
        found += expected is not None
    assert found > 300


def test_a_long_prompt_whose_tokens_all_end_as_the_marker_does() -> None:
    """Its cost is that of its distinct tokens, and one search."""
    vocabulary = [b"<", b"t", b">", b"t>", b"/", b"<t"]
    asked = Counter[int]()

    def symbols_of(token: int) -> bytes:
        asked[token] += 1
        return vocabulary[token]

    marker = TokenMarker([0, 1, 2], symbols_of)
    asked.clear()
    for opened, expected in (([], None), ([0, 1, 2], 100_000), ([0, 3], 100_000), ([5], 99_999)):
        assert marker.tokens_since([*opened, *[2, 3] * 50_000]) == expected
    assert max(asked.values()) <= 4
