"""Token rules as masks: at the next token, at every node of a tree, beside a grammar, and when nothing is left."""

from __future__ import annotations

import time

import numpy as np
import pytest

from common.errors import InternalError, InvalidRequest
from common.grammar import mask_width
from common.grammar.grammars import NO_GRAMMARS
from common.grammar.no_token import no_token
from common.grammar.token_rules import RuleFollower, constraint_of
from common.messages.generation import SamplingParams, TokenRules
from tests.fakes.tiny_grammar import GRAMMARS, VOCAB, allowed_tokens, matcher, next_tokens, tiny_compiler


def test_words_are_forbidden_where_the_answer_ends_with_their_beginning() -> None:
    rules = TokenRules(tuple(range(10, 40)), ((12,), (13, 14), (13, 14, 15), (31, 31)))
    follower = RuleFollower(rules, None, VOCAB)
    free = set(range(10, 40)) - {12}
    assert next_tokens(follower) == free
    assert follower.accept([13])
    assert next_tokens(follower) == free - {14}
    assert follower.accept([14])
    assert next_tokens(follower) == free - {15}
    assert follower.accept([31])
    assert next_tokens(follower) == free - {31}
    assert follower.accept([20])
    assert next_tokens(follower) == free
    assert not follower.stopped
    assert follower.forced(5) == []


def test_each_node_of_a_tree_has_the_mask_of_its_path() -> None:
    rules = TokenRules((), ((1, 2, 3), (2, 9), (4, 63)))
    follower = RuleFollower(rules, None, VOCAB)
    assert follower.accept([1])
    tokens, parents = [1, 2, 4, 2, 3], [-1, 0, 0, 2, 1]
    masks = np.zeros((7, mask_width(VOCAB)), dtype=np.int32)
    follower.fill_tree(masks, 1, tokens, parents)
    everything = set(range(VOCAB))
    expected = [everything, everything - {3, 9}, everything - {63}, everything - {9}, everything]
    assert [allowed_tokens(masks, 1 + node) for node in range(5)] == expected
    assert not masks[0].any()
    assert not masks[6].any()


def test_beside_a_grammar_both_apply() -> None:
    params = SamplingParams(
        max_tokens=4, grammar=GRAMMARS["numbers"], token_rules=TokenRules((), ((27,), (28,)))
    )
    waiting = constraint_of(params, tiny_compiler(), VOCAB, time.monotonic)
    assert waiting is not None
    while not waiting.ready(time.monotonic()):
        time.sleep(0.001)
    follower, alone = waiting.matcher(), matcher(GRAMMARS["numbers"])
    masks = np.zeros((2, mask_width(VOCAB)), dtype=np.int32)
    follower.fill(masks, 0)
    alone.fill(masks, 1)
    assert allowed_tokens(masks, 0) == allowed_tokens(masks, 1) - {27, 28}
    token = min(allowed_tokens(masks, 0))
    assert follower.accept([token])
    assert alone.accept([token])
    follower.fill_tree(masks[:1], 0, [token], [-1])
    alone.fill(masks, 1)
    assert allowed_tokens(masks, 0) == allowed_tokens(masks, 1) - {27, 28}
    assert (follower.stopped, follower.end_token) == (alone.stopped, alone.end_token)


def test_rules_need_no_tokenizer_and_no_waiting() -> None:
    params = SamplingParams(max_tokens=4, token_rules=TokenRules((5,)))
    waiting = constraint_of(params, NO_GRAMMARS, VOCAB, time.monotonic)
    assert waiting is not None
    assert waiting.ready(0.0)
    assert constraint_of(SamplingParams(max_tokens=4), NO_GRAMMARS, VOCAB, time.monotonic) is None


@pytest.mark.parametrize("tree", [False, True])
def test_a_request_ends_if_no_token_is_left(tree: bool) -> None:
    follower = RuleFollower(TokenRules((5,), ((5, 5),)), None, VOCAB)
    assert next_tokens(follower) == {5}
    assert follower.accept([5])
    masks = np.zeros((2, mask_width(VOCAB)), dtype=np.int32)
    if tree:
        follower.fill_tree(masks, 0, [5, 5], [-1, 0])
    else:
        follower.fill(masks, 0)
    assert isinstance(follower.failure, InvalidRequest)
    assert follower.failure.param == "allowed_token_ids"
    assert allowed_tokens(masks, 0) == set(range(VOCAB)), "a failed follower allows every token"


@pytest.mark.parametrize(
    ("rules", "fields", "param"),
    [
        (TokenRules((0,)), "allowed_token_ids and the grammar together forbid", "allowed_token_ids"),
        (
            TokenRules((0,), ((28,),)),
            "allowed_token_ids, bad_words and the grammar together",
            "allowed_token_ids",
        ),
        (TokenRules((), tuple((token,) for token in range(VOCAB))), "bad_words and the grammar", "bad_words"),
    ],
)
def test_the_error_lists_the_fields_of_the_request(rules: TokenRules, fields: str, param: str) -> None:
    follower = RuleFollower(rules, matcher(GRAMMARS["numbers"]), VOCAB)
    everything = np.full((1, mask_width(VOCAB)), 0, dtype=np.int32)
    matcher(GRAMMARS["numbers"]).fill(everything, 0)
    assert not rules.allowed or not allowed_tokens(everything, 0) & set(rules.allowed)
    assert next_tokens(follower) == set(range(VOCAB))
    assert isinstance(follower.failure, InvalidRequest)
    assert fields in str(follower.failure)
    assert follower.failure.param == param


class Nothing(RuleFollower):
    """Forbids every token and does not notice."""

    def fill(self, masks: np.ndarray[tuple[int, ...], np.dtype[np.int32]], row: int) -> None:
        masks[row] = 0


def test_a_grammar_is_no_field() -> None:
    params = SamplingParams(max_tokens=4, grammar=GRAMMARS["numbers"])
    error = no_token(params, 1, Nothing(TokenRules(), None, VOCAB), VOCAB)
    assert isinstance(error, InvalidRequest)
    assert "the grammar forbids all of them" in str(error)
    assert error.param is None


def test_a_draw_without_a_result_is_a_defect_if_tokens_were_left() -> None:
    """`min_tokens` withholds a token only while the answer is shorter."""
    params = SamplingParams(
        max_tokens=4, token_rules=TokenRules((5,)), min_tokens=2, stop_token_ids=(5,), logit_bias=((4, 1.0),)
    )
    follower = RuleFollower(TokenRules((5,)), None, VOCAB)
    early, late = (no_token(params, said, follower, VOCAB) for said in (1, 2))
    assert isinstance(early, InvalidRequest)
    assert isinstance(late, InternalError)
    assert isinstance(no_token(SamplingParams(max_tokens=4), 0, None, VOCAB), InternalError)
