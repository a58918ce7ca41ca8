"""The limit of reasoning tokens: where an answer is, which token follows, and how long no mask is needed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from common.errors import InvalidRequest
from common.grammar import mask_width
from common.grammar.thinking_budget import LEAD, NEVER
from common.grammar.token_rules import RuleFollower
from common.messages.generation import ThinkingLimit, TokenRules
from tests.fakes.tiny_grammar import (
    GRAMMARS,
    TOKENS,
    VOCAB,
    allowed_tokens,
    decoded,
    matcher,
    next_tokens,
    tiny_compiler,
)

BEGIN, END, WORD = 40, 33, 7  # of 64 tokens
LONG = (END, WORD, END)  # a marker of several tokens
EVERYTHING = set(range(VOCAB))


def follower(
    tokens: int, spent: int | None = None, said: Sequence[int] = (), end: tuple[int, ...] = (END,)
) -> RuleFollower:
    """Return the follower of an answer under a limit of `tokens` that has said `said`."""
    made = RuleFollower(TokenRules(thinking=ThinkingLimit(tokens, (BEGIN,), end, spent)), None, VOCAB)
    assert made.accept(said)
    return made


@pytest.mark.parametrize(
    ("tokens", "spent", "said", "unmasked"),
    [
        (0, 0, [], 0),
        (3, 0, [], 3),
        (3, 2, [], 1),
        (3, 9, [], 0),
        (3, 0, [WORD, WORD], 1),
        (3, 0, [WORD, WORD, WORD], 0),
        (3, 0, [WORD, BEGIN, WORD], 0),
        (3, 0, [WORD, END], NEVER),
        (3, 0, [WORD] * 3 + [END], NEVER),
        (3, 0, [END, BEGIN, WORD, WORD, WORD], NEVER),
        (0, None, [], 1),
        (0, None, [BEGIN], 0),
        (3, None, [], 4),
        (3, None, [WORD] * LEAD, 4),
        (3, None, [WORD] * LEAD + [BEGIN, WORD], 2),
        (3, None, [WORD] * (LEAD + 1), NEVER),
        (3, None, [WORD] * (LEAD + 1) + [BEGIN] + [WORD] * 9, NEVER),
        (3, None, [END, BEGIN, WORD, WORD, WORD], 0),
    ],
)
def test_only_the_marker_follows_as_many_tokens_as_the_limit_allows(
    tokens: int, spent: int | None, said: list[int], unmasked: int
) -> None:
    """One section of reasoning counts, at the beginning of the answer."""
    followed = follower(tokens, spent, said)
    assert followed.unmasked == unmasked
    assert next_tokens(followed) == (EVERYTHING if unmasked else {END})
    assert followed.forced(4) == ([] if unmasked else [END])
    assert followed.failure is None
    assert not followed.stopped


@pytest.mark.parametrize(
    ("tokens", "said", "forced"),
    [
        (0, [], LONG),
        (0, [END], LONG[1:]),
        (0, [END, WORD], LONG[2:]),
        (0, LONG, ()),
        (2, [WORD], ()),
        (2, [WORD, WORD], LONG),
        (2, [WORD, END], LONG[1:]),
        (2, [END, WORD], LONG[2:]),
        (2, [END, END], LONG[1:]),
        (2, [*LONG, WORD, WORD], ()),
        (4, [END, WORD, WORD], ()),
        (4, [END, WORD, WORD, END], LONG[1:]),
        (4, [END, WORD, WORD, WORD], LONG),
    ],
)
def test_a_marker_of_several_tokens_is_completed(
    tokens: int, said: Sequence[int], forced: Sequence[int]
) -> None:
    """What the model has written of it is not written again, and tokens of it count until it is complete."""
    followed = follower(tokens, 0, said, LONG)
    assert followed.forced(9) == [*forced]
    assert followed.forced(1) == [*forced[:1]]
    for token in forced:
        assert next_tokens(followed) == {token}
        assert followed.accept([token])
    assert next_tokens(followed) == EVERYTHING
    assert (followed.unmasked == NEVER) is (bool(forced) or tuple(said[:3]) == LONG)


@pytest.mark.parametrize("before", range(LEAD + 2))
def test_a_beginning_of_several_tokens(before: int) -> None:
    rules = TokenRules(thinking=ThinkingLimit(1, LONG, LONG))
    followed = RuleFollower(rules, None, VOCAB)
    assert followed.accept([WORD] * before + [*LONG])
    assert followed.unmasked == (1 if before <= LEAD else NEVER)


@pytest.mark.parametrize("marker", ["aname", "namna", 'e"'])
def test_markers_are_found_in_the_text_however_it_is_split(marker: str) -> None:
    """Random tokens write the markers, or parts of them, in ways in which the tokenizer does not."""
    compiler, rng, ways = tiny_compiler(), random.Random(4), set[tuple[int, ...]]()
    end = tuple(compiler.tokenize(marker))
    pieces = [
        at for at, piece in enumerate(TOKENS) if piece in ("a", "n", "m", "e", "na", "nam", "name", '":', '"')
    ]
    for _ in range(600):
        budget = rng.randint(0, 9)
        rules = TokenRules(thinking=ThinkingLimit(budget, end, end, 0))
        followed, said = RuleFollower(rules, None, VOCAB, compiler.symbols_of), list[int]()
        while marker not in decoded(said):
            assert followed.unmasked == max(budget - len(said), 0)
            forced = followed.forced(9)
            assert bool(forced) is (len(said) >= budget)
            said.append(forced[0] if forced else rng.choice(pieces))
            assert next_tokens(followed) == ({said[-1]} if forced else EVERYTHING)
            assert followed.accept(said[-1:])
        assert followed.unmasked == NEVER
        assert len(said) <= budget + len(end)
        assert marker not in decoded(said[:-1])
        ways.add(tuple(said[-len(end) :]))
    assert len(ways) > 2, "the marker was written in several ways"


def test_reasoning_may_begin_and_end_within_a_token() -> None:
    compiler, tokens = tiny_compiler(), TOKENS.index
    rules = TokenRules(thinking=ThinkingLimit(3, (tokens('"'),), (tokens(":"), tokens("a"))))
    followed = RuleFollower(rules, None, VOCAB, compiler.symbols_of)
    assert followed.accept([tokens('":'), tokens("b")])
    assert followed.unmasked == 2
    assert followed.accept([tokens('":'), tokens("al")])
    assert followed.unmasked == NEVER


def test_without_a_mask_no_token_is_forbidden_whatever_is_drawn() -> None:
    """From every beginning, `unmasked` is the least number of tokens after which the marker is forced."""
    for spent in (0, None):
        for first in (WORD, BEGIN, END):
            followed = follower(2, spent, [first])
            if followed.unmasked == NEVER:
                continue
            ways = [list[int]()]
            for _ in range(followed.unmasked):
                assert all(next_tokens(follower(2, spent, [first, *way])) == EVERYTHING for way in ways), (
                    spent,
                    first,
                )
                ways = [[*way, token] for way in ways for token in (WORD, BEGIN, END)]
            assert any(next_tokens(follower(2, spent, [first, *way])) == {END} for way in ways)


def test_each_node_of_a_tree_has_the_place_of_its_path() -> None:
    followed = follower(3, 0, [WORD, WORD])
    tokens, parents = [WORD, WORD, END, 9, END, BEGIN], [-1, 0, 0, 1, 1, 2]
    masks = np.zeros((8, mask_width(VOCAB)), dtype=np.int32)
    followed.fill_tree(masks, 1, tokens, parents)
    expected = [EVERYTHING, {END}, EVERYTHING, {END}, EVERYTHING, EVERYTHING]
    assert [allowed_tokens(masks, 1 + node) for node in range(6)] == expected
    assert not masks[0].any()
    assert not masks[7].any()
    assert next_tokens(followed) == EVERYTHING, "drafts are not part of the answer"


def test_rules_and_grammars_need_masks_all_the_time() -> None:
    limit = ThinkingLimit(3, (BEGIN,), (END,), 0)
    assert RuleFollower(TokenRules((END, WORD), thinking=limit), None, VOCAB).unmasked == 0
    assert RuleFollower(TokenRules((), ((WORD,),), limit), None, VOCAB).unmasked == 0
    grammar = matcher(GRAMMARS["words"])
    assert grammar.unmasked == 0
    assert RuleFollower(TokenRules(thinking=limit), grammar, VOCAB).unmasked == 0
    assert RuleFollower(TokenRules(), None, VOCAB).unmasked == NEVER


def test_the_limit_is_named_if_the_marker_may_not_follow() -> None:
    rules = TokenRules((WORD,), thinking=ThinkingLimit(1, (BEGIN,), (END,), 0))
    followed = RuleFollower(rules, None, VOCAB)
    assert next_tokens(followed) == {WORD}
    assert followed.accept([WORD])
    assert next_tokens(followed) == EVERYTHING, "a failed follower allows every token"
    assert isinstance(followed.failure, InvalidRequest)
    assert "allowed_token_ids and thinking_token_budget together" in str(followed.failure)
