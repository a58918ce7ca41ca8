"""The first token of constrained prompts is drawn on the prefill node, under the grammar's mask."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import TokenRules
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.sampling_cases import EVERYTHING
from tests.fakes.scenarios import expect_reference, prompt_of
from tests.fakes.tiny_grammar import EOS, GRAMMARS, HeldCompiler, decoded, regex, tiny_compiler

STRICT = [regex('"name":[0-9]{3}'), regex("(x|y)_[a-c]{2,9}"), regex(r"\[\[[1-9]")]
RANDOM: dict[str, Any] = {"temperature": 1.3}
ENDS: dict[str, Any] = {"min_tokens": 0, "stop_token_ids": (EOS,)}


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_first_tokens_follow_the_grammar(completion: type[Completion]) -> None:
    """In one batch with free prompts, and in prompts of several chunks."""
    with NodeCluster(Shape(completion=completion, grammars=tiny_compiler(), max_running=8)) as cluster:
        calls: list[Call] = []
        for number, grammar in enumerate(STRICT):
            calls.append(cluster.submit(prompt_of(9 + number), 20, grammar=grammar))
            calls.append(cluster.submit(prompt_of(70 + number), 20, grammar=grammar, seed=number, **RANDOM))
            calls.append(cluster.submit(prompt_of(9), 5, seed=number, **RANDOM))
        cluster.run()
        expect_reference(*calls)
        assert decoded(calls[0].ids).startswith('"name":')
        cluster.settle()


@pytest.mark.parametrize("sampling", [{}, RANDOM])
def test_beside_every_other_parameter(sampling: dict[str, Any]) -> None:
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        calls = [
            cluster.submit(prompt_of(9), 12, grammar=each, **{**EVERYTHING, **ENDS, **sampling})
            for each in STRICT
        ]
        calls.append(cluster.submit(prompt_of(9), 12, grammar=STRICT[1], logprobs=3, **sampling))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


def test_an_answer_may_be_one_token() -> None:
    """Nothing may follow the first token, so the decode node is not needed."""
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        call = cluster.submit(prompt_of(9), 20, grammar=regex("[xyz]"))
        cluster.run()
        expect_reference(call)
        assert (len(call.ids), call.finish) == (1, "stop")
        cluster.settle()


def test_a_second_attempt_replays_the_answer_so_far() -> None:
    """The tokens at the end of the prompt that are output go through the grammar before the mask is made."""
    with NodeCluster(Shape(grammars=tiny_compiler(), prefills=2, decodes=2)) as cluster:
        calls = [
            cluster.submit(prompt_of(9), 60, grammar=each, seed=4, **RANDOM) for each in GRAMMARS.values()
        ]
        cluster.run(until=lambda: all(len(call.ids) > 4 for call in calls))
        lost = cluster.decodes[0]
        cluster.kill(lost)
        cluster.lose(lost)
        cluster.run()
        expect_reference(*calls)
        assert all(call.attempts > 1 for call in calls)
        cluster.settle()


def test_other_prompts_pass_one_whose_grammar_is_not_compiled_yet() -> None:
    held = HeldCompiler()
    with NodeCluster(Shape(grammars=held)) as cluster:
        first = cluster.submit(prompt_of(9), 20, grammar=STRICT[0])
        later = cluster.submit(prompt_of(9), 20)
        cluster.run(until=lambda: later.over)
        assert not first.output
        held.released = True
        cluster.run()
        expect_reference(first, later)
        cluster.settle()


def test_aborts_while_the_grammar_compiles() -> None:
    with NodeCluster(Shape(grammars=HeldCompiler())) as cluster:
        call = cluster.submit(prompt_of(9), 20, grammar=STRICT[0])
        cluster.turn(3)
        cluster.abort(call)
        cluster.settle()


@pytest.mark.parametrize(
    ("grammar", "said"), [("{}", "cannot be read"), (regex("(?=a)b"), "cannot be compiled")]
)
def test_a_grammar_that_does_not_compile_ends_its_request_only(grammar: str, said: str) -> None:
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        broken = cluster.submit(prompt_of(9), 20, grammar=grammar, legs="p")
        other = cluster.submit(prompt_of(9), 20, grammar=STRICT[0])
        cluster.run()
        expect_reference(other)
        assert broken.error is not None
        assert (broken.error.code, said in broken.error.message) == ("invalid_grammar", True)
        cluster.settle()


def test_no_token_is_left() -> None:
    """The bias of the only allowed token is -inf."""
    bias = tuple((token, float("-inf")) for token in range(64))
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        call = cluster.submit(prompt_of(9), 20, grammar=STRICT[0], logit_bias=bias, legs="p")
        cluster.run()
        assert call.error is not None
        assert (call.error.code, call.error.param) == ("invalid_value", "logit_bias")
        assert "logit_bias and the grammar together forbid all" in call.error.message


def test_a_first_token_that_may_not_end_the_answer_yet() -> None:
    with NodeCluster(Shape()) as cluster:
        call = cluster.submit(
            prompt_of(9), 20, token_rules=TokenRules((7,)), min_tokens=1, stop_token_ids=(7,), legs="p"
        )
        cluster.run()
        assert call.error is not None
        assert (call.error.code, call.error.param) == ("invalid_value", "allowed_token_ids")
        assert "allowed_token_ids and min_tokens together forbid all" in call.error.message
