"""The position of an answer in its grammar: masks, trees of candidates, forced tokens, ends and failures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from common.errors import InternalError, InvalidGrammar
from common.grammar import GrammarCompiler, GrammarLimits, Matcher, mask_width
from common.grammar.matcher import Masks

TOKENIZER = Path("deploy/tiny_models/tiny-target/tokenizer.json").read_text()
VOCAB, EOS = 704, 2
COMPILER = GrammarCompiler(TOKENIZER, VOCAB, [EOS])
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "tags": {"enum": ["a", "ab", "b"]}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
COMPACT = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), overrides={"whitespace_flexible": False})
GRAMMARS = [
    COMPACT,
    LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    LLMatcher.grammar_from_regex("a+b{2,5}(c|dd)*"),
    LLMatcher.grammar_from_lark('start: "x" (start | "y")'),
]


def _masks(rows: int) -> Masks:
    return np.full((rows, mask_width(VOCAB)), 0x5A5A5A5A, dtype=np.int32)


def _allowed(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def _next(matcher: Matcher) -> list[int]:
    masks = _masks(1)
    matcher.fill(masks, 0)
    return _allowed(masks[0])


def _walk(matcher: Matcher, choices: list[int]) -> list[int]:
    """Accept one allowed token per choice and return them; stops at the end of the text."""
    walked: list[int] = []
    for choice in choices:
        allowed = _next(matcher)
        token = allowed[choice % len(allowed)]
        assert matcher.accept([token])
        walked.append(token)
        if matcher.ended:
            break
    return walked


def test_an_answer_ends_only_where_the_grammar_is_complete() -> None:
    matcher = COMPILER.matcher(LLMatcher.grammar_from_regex("ab?"))
    [a], [b] = COMPILER.tokenize("a"), COMPILER.tokenize("b")
    assert EOS not in _next(matcher)
    assert matcher.accept([a])
    assert not matcher.stopped
    assert set(_next(matcher)) == {b, EOS}
    assert matcher.accept([b])
    assert matcher.stopped
    assert _next(matcher) == [EOS]
    assert matcher.accept([EOS])
    assert matcher.ended
    masks = _masks(1)
    matcher.fill(masks, 0)
    assert (masks == -1).all()


def test_candidates_past_the_end_undo_no_real_token() -> None:
    """llguidance accepts an end token of a complete grammar without recording it."""
    [a], [b] = COMPILER.tokenize("a"), COMPILER.tokenize("b")
    matcher = COMPILER.matcher(LLMatcher.grammar_from_regex("ab"))
    masks = _masks(4)
    matcher.fill_tree(masks, 0, [0, a, b, EOS], [-1, 0, 1, 2])
    assert [_allowed(row) for row in masks[:3]] == [[a], [b], [EOS]]
    assert (masks[3] == -1).all()
    assert _next(matcher) == [a]
    assert matcher.accept([a, b, EOS])


@given(
    st.sampled_from(GRAMMARS),
    st.lists(st.integers(0, 10**6), max_size=12),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.booleans()), max_size=14),
)
def test_a_tree_has_the_mask_of_a_fork_per_node(
    grammar: str, choices: list[int], nodes: list[tuple[int, int, bool]]
) -> None:
    root = COMPILER.matcher(grammar)
    _walk(root, choices)
    before = _next(root)
    # None: at and below a candidate that is not allowed or ends the text
    forks: list[Matcher | None] = [root.fork()]
    tokens, parents = [0], [-1]
    for parent_choice, token_choice, any_token in nodes:
        parent = parent_choice % len(tokens)
        above = forks[parent]
        allowed = range(VOCAB) if any_token or above is None else _next(above)
        token = allowed[token_choice % len(allowed)]
        child = None if above is None or above.ended else above.fork()
        forks.append(child if child is not None and child.accept([token]) and not child.ended else None)
        tokens.append(token)
        parents.append(parent)
    masks = _masks(len(tokens) + 2)
    root.fill_tree(masks, 1, tokens, parents)
    for row, fork in zip(masks[1:-1], forks):
        expected = _masks(1)
        expected[:] = -1
        if fork is not None:
            fork.fill(expected, 0)
        assert (row == expected[0]).all()
    assert (masks[[0, -1]] == 0x5A5A5A5A).all()
    assert _next(root) == before
    assert root.failure is None


@given(st.sampled_from(GRAMMARS), st.lists(st.integers(0, 10**6), max_size=30), st.integers(0, 30))
def test_a_replay_equals_the_steps(grammar: str, choices: list[int], cut: int) -> None:
    stepped = COMPILER.matcher(grammar)
    tokens = _walk(stepped, choices)
    replayed = COMPILER.matcher(grammar)
    assert replayed.accept(tokens[:cut])
    assert replayed.accept(tokens[cut:])
    assert _next(replayed) == _next(stepped)
    assert replayed.forced(8) == stepped.forced(8)
    assert (replayed.stopped, replayed.ended) == (stepped.stopped, stepped.ended)


@given(st.sampled_from(GRAMMARS), st.lists(st.integers(0, 10**6), max_size=12), st.integers(0, 6))
def test_forced_tokens_are_legal_and_change_nothing(grammar: str, choices: list[int], limit: int) -> None:
    matcher = COMPILER.matcher(grammar)
    _walk(matcher, choices)
    before = _next(matcher)
    forced = matcher.forced(limit)
    assert len(forced) <= limit
    assert matcher.fork().accept(forced)
    assert _next(matcher) == before


def test_keys_are_forced_in_the_split_of_the_tokenizer() -> None:
    matcher = COMPILER.matcher(COMPACT)
    forced = matcher.forced(64)
    assert COMPILER.tokenize('{"name":"')[: len(forced)] == forced
    assert len(forced) >= 4
    assert matcher.forced(2) == forced[:2]


@pytest.mark.parametrize("token", [300, EOS, -1, VOCAB, 10**6])
def test_a_token_outside_the_grammar_fails_its_matcher(token: int) -> None:
    matcher = COMPILER.matcher(COMPACT)
    other = matcher.fork()
    assert not matcher.accept([token])
    assert isinstance(matcher.failure, InternalError)
    assert matcher.forced(4) == []
    assert f"token {token}, number 0 of those" in str(matcher.failure)
    masks = _masks(1)
    matcher.fill(masks, 0)
    assert (masks == -1).all()
    masks = _masks(2)
    matcher.fill_tree(masks, 0, [0, COMPILER.tokenize("{")[0]], [-1, 0])
    assert (masks == -1).all()
    assert other.failure is None
    assert other.accept(COMPILER.tokenize('{"'))


@pytest.mark.parametrize("masked", [True, False])
def test_a_grammar_that_grows_too_complex_fails_in_the_middle(masked: bool) -> None:
    """Also while an answer that has begun elsewhere is replayed, without masks: its client has caused that."""
    compiler = GrammarCompiler(TOKENIZER, VOCAB, [EOS], GrammarLimits(step_items=2000))
    nested = LLMatcher.grammar_from_lark('start: (("a"{0,60} "b"?){0,60}){0,60} "c"')
    matcher = compiler.matcher(nested)
    [a] = compiler.tokenize("a")
    masks = _masks(1)
    for _ in range(60):
        if masked:
            matcher.fill(masks, 0)
        if not matcher.accept([a]):
            break
    assert isinstance(matcher.failure, InvalidGrammar)
    assert "in the middle of the answer" in str(matcher.failure)
    matcher.fill_tree(masks, 0, [0], [-1])
    assert (masks == -1).all()
