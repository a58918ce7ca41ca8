"""Grammars in EBNF mean in Lark what they mean in llama.cpp, which Python's own regular expressions tell here."""

from __future__ import annotations

import random
import re
from itertools import product

import pytest

from router.grammar.ebnf import lark_of
from tests.fakes.tiny_grammar import EOS, TOKENS, matcher

TEXTS = ["".join(each) for length in range(7) for each in product("ab", repeat=length)]


def accepts(lark: str, text: str) -> bool:
    follower = matcher(lark)
    return follower.accept([*map(TOKENS.index, text), EOS])


def expression(rng: random.Random, depth: int) -> tuple[str, str]:
    """Return a random expression in EBNF and as a regular expression."""
    kind = rng.choice(["text", "class"] if depth == 0 else ["sequence", "choice", "repeat", "repeat"])
    if kind == "text":
        text = "".join(rng.choices("ab", k=rng.randint(1, 2)))
        return f'"{text}"', text
    if kind == "class":
        return rng.choice([("[a]", "[a]"), ("[^a]", "[^a]"), ("[ab]", "[ab]")])
    parts = [expression(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    if kind == "sequence":
        return f"({' '.join(a for a, _ in parts)})", "".join(f"(?:{b})" for _, b in parts)
    if kind == "choice":
        return f"({' | '.join(a for a, _ in parts)})", "|".join(f"(?:{b})" for _, b in parts)
    times = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{2,}"])
    return f"({parts[0][0]}){times}", f"(?:{parts[0][1]}){times}"


@pytest.mark.parametrize("seed", range(16))
def test_random_expressions_accept_nothing_else(seed: int) -> None:
    """llguidance splits a text into its longest pieces, and so misses a few texts of ambiguous grammars."""
    ebnf, pattern = expression(random.Random(seed), 3)
    lark, same = lark_of(f"root ::= {ebnf}"), re.compile(pattern)
    found = {text for text in TEXTS if accepts(lark, text)}
    expected = {text for text in TEXTS if same.fullmatch(text)}
    assert found <= expected, (ebnf, lark)
    assert 2 * len(found) >= len(expected), (ebnf, lark)


@pytest.mark.parametrize(
    ("ebnf", "pattern"),
    [
        ('root ::= ("a"{2})*', "(aa)*"),
        ('root ::= (("a"{2}){1,2} "b")+', "((aa){1,2}b)+"),
        ('root ::= (("ab")?){2}', "(ab)?(ab)?"),
        ('root ::= "a" ("b" | "a" "b")* x\nx ::= ("a"+){2,}', "a(b|ab)*(a+){2,}"),
    ],
)
def test_parentheses_stay(ebnf: str, pattern: str) -> None:
    lark = lark_of(ebnf)
    assert [text for text in TEXTS if accepts(lark, text)] == [
        text for text in TEXTS if re.fullmatch(pattern, text)
    ]


@pytest.mark.parametrize(
    ("ebnf", "accepted"),
    [
        (r'root ::= "\u0061\U00000062"', ["ab"]),
        (r"root ::= [\u0061-\u0062]", ["a", "b"]),
        (r"root ::= [^\x62\u005d]", ["a"]),
    ],
)
def test_escaped_code_points(ebnf: str, accepted: list[str]) -> None:
    lark = lark_of(ebnf)
    assert [text for text in TEXTS if accepts(lark, text)] == accepted


@pytest.mark.parametrize("code", ['"\\ud800"', "[\\U00110000]", '"\\u00"', '"a', "(("])
def test_what_is_no_grammar_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="not a grammar in EBNF"):
        lark_of(f"root ::= {code}")
