"""Constrained requests on a decode node: the text of a reference that masks logits and draws, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import TokenRules
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from decode_node.grammar_masks import SLOWEST_MASK
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import Call, MakeStep, NodeCluster, Shape, autoregressive, with_forced_tokens
from tests.fakes.sampling_cases import EVERYTHING
from tests.fakes.scenarios import SAMPLED, expect_reference, lose_decode, prompt_of
from tests.fakes.tiny_grammar import EOS, GRAMMARS, NUMBERS, HeldCompiler, regex, tiny_compiler

RANDOM: dict[str, Any] = {"temperature": 1.3}


def submit(cluster: NodeCluster, name: str, length: int, max_tokens: int = 60, **more: Any) -> Call:
    return cluster.submit(prompt_of(length), max_tokens, grammar=GRAMMARS[name], **more)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_beside_free_requests_in_one_batch(completion: type[Completion]) -> None:
    with NodeCluster(Shape(completion=completion, max_running=7, grammars=tiny_compiler())) as cluster:
        calls = [submit(cluster, name, 9) for name in GRAMMARS]
        calls += [submit(cluster, name, 17, seed=5, **RANDOM) for name in GRAMMARS]
        calls.append(submit(cluster, "record", 12, seed=6, logprobs=2, **SAMPLED))
        calls += [cluster.submit(prompt_of(9), 30), cluster.submit(prompt_of(9), 30, seed=3, **RANDOM)]
        cluster.run()
        expect_reference(*calls)
        assert {call.finish for call in calls[:7]} == {"stop"}
        assert not any(EOS in call.ids for call in calls[:2]), (
            "a grammar that is over needs no token to say so"
        )
        assert any(EOS in call.ids for call in calls), "one that may go on needs one"
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_free_batches_keep_their_graphs(completion: type[Completion]) -> None:
    """Only the steps of the constrained request draw outside the graph."""
    with NodeCluster(Shape(completion=completion, grammars=tiny_compiler())) as cluster:
        calls = [submit(cluster, "numbers", 9), cluster.submit(prompt_of(9), 90)]
        cluster.run()
        expect_reference(*calls)
        replays = cluster.decode.steps.graphs[0].forward.graphs.counters.replays
        by_variant: dict[str, int] = {}
        for key, count in replays.items():
            by_variant[key.variant] = by_variant.get(key.variant, 0) + count
        assert by_variant["logits"] == len(calls[0].ids) - 1
        assert by_variant["greedy"] >= 89 - by_variant["logits"]
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_retracted_requests_keep_their_place_in_the_grammar(completion: type[Completion]) -> None:
    shape = Shape(
        page_size=4,
        decode_pool=96,
        reserved_tokens=4,
        completion=completion,
        max_running=4,
        grammars=tiny_compiler(),
    )
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, "words", 10 + n, 40, seed=n, **SAMPLED) for n in range(3)]
        calls += [submit(cluster, "record", 11 + n, 40) for n in range(2)]
        calls.append(cluster.submit(prompt_of(12), 40))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        cluster.settle()


@pytest.mark.parametrize("step", [autoregressive, with_forced_tokens])
def test_another_node_continues_in_the_grammar(step: MakeStep) -> None:
    """The lost node's tokens are replayed from the end of the new prompt."""
    for said in (1, 4, 9):
        shape = Shape(page_size=4, decodes=2, grammars=tiny_compiler(), step=step)
        with NodeCluster(shape) as cluster:
            call = submit(cluster, "record", 17, seed=5, **RANDOM)
            cluster.run(until=lambda call=call, said=said: len(call.output) >= said)  # type: ignore[misc]
            lose_decode(cluster, call)
            assert call.base >= said


@pytest.mark.parametrize("sampling", [{}, RANDOM])
def test_with_every_other_parameter(sampling: dict[str, Any]) -> None:
    """The mask applies after penalties, biases and min_tokens, and before the filters."""
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        stops = {**EVERYTHING, "stop_token_ids": (EOS, 21), **sampling}
        calls = [submit(cluster, name, 9, 40, **stops) for name in GRAMMARS]
        calls.append(submit(cluster, "words", 12, 40, **stops, top_k=4, top_p=0.9, min_p=0.05))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


def test_a_grammar_without_an_allowed_token_ends_its_request_only() -> None:
    """The bias of every digit is -inf where the grammar demands one."""
    bias = tuple((token, float("-inf")) for token in range(27, 37))
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        broken = submit(cluster, "numbers", 9, logit_bias=bias)
        others = [submit(cluster, "numbers", 9), cluster.submit(prompt_of(9), 20)]
        cluster.run()
        expect_reference(*others)
        assert broken.error is not None
        assert (broken.error.code, broken.error.param) == ("invalid_value", "logit_bias")
        assert "logit_bias and the grammar together forbid all" in broken.error.message
        cluster.settle()


@pytest.mark.parametrize("step", [autoregressive, with_forced_tokens, ngram(3)])
def test_rules_that_leave_no_token_in_the_middle_of_an_answer_are_the_clients_mistake(step: MakeStep) -> None:
    """Token 5 may not follow itself, and token 7 would end the answer before `min_tokens`."""
    stuck: dict[str, Any] = {"min_tokens": 9, "stop_token_ids": (7,)}
    with NodeCluster(Shape(step=step)) as cluster:
        broken = cluster.submit(prompt_of(9), 20, token_rules=TokenRules((5, 7), ((5, 5),)), **stuck)
        free = cluster.submit(prompt_of(9), 20, token_rules=TokenRules((5, 7)), **stuck)
        cluster.run()
        expect_reference(free)
        assert free.finish is not None
        assert broken.ids == [5]
        assert broken.error is not None
        assert (broken.error.code, broken.error.param) == ("invalid_value", "allowed_token_ids")
        assert "allowed_token_ids, bad_words and min_tokens together" in broken.error.message
        cluster.settle()


@pytest.mark.parametrize(
    ("grammar", "said"), [("{}", "cannot be read"), (regex("(?=a)b"), "cannot be compiled")]
)
def test_a_grammar_that_does_not_compile_ends_its_request_only(grammar: str, said: str) -> None:
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        broken = cluster.submit(prompt_of(9), 20, grammar=grammar)
        other = submit(cluster, "numbers", 9)
        cluster.run()
        expect_reference(other)
        assert broken.error is not None
        assert (broken.error.code, said in broken.error.message) == ("invalid_grammar", True)
        cluster.settle()


def test_a_first_token_outside_the_grammar_ends_its_request() -> None:
    """The node does not trust what it is told: the answer so far has to match."""
    with NodeCluster(Shape(grammars=tiny_compiler(), decodes=2)) as cluster:
        call = cluster.submit(prompt_of(9), 20)
        cluster.run()
        cluster.settle()
        call.sampling = cluster.submit(prompt_of(9), 60, grammar=NUMBERS).sampling
        cluster.run()
        call.finish = None
        cluster.place(call)
        cluster.run()
        assert call.error is not None
        assert "is not in the grammar" in call.error.message
        cluster.settle()


def test_a_node_without_a_tokenizer_refuses_grammars() -> None:
    with NodeCluster(Shape()) as cluster:
        call = submit(cluster, "numbers", 9, legs="d")
        cluster.run()
        assert call.error is not None
        assert (call.error.code, "tokenizer.json" in call.error.message) == ("invalid_grammar", True)


def test_requests_pass_one_whose_grammar_is_not_compiled_yet() -> None:
    """It joins the batch once its grammar is compiled."""
    held = HeldCompiler()
    with NodeCluster(Shape(grammars=held, max_running=1)) as cluster:
        first = submit(cluster, "numbers", 9)
        later = cluster.submit(prompt_of(9), 20)
        cluster.run(until=lambda: later.over)
        assert not first.over
        assert not first.output, "the prefill node waits, too"
        held.released = True
        cluster.run()
        expect_reference(first, later)
        cluster.settle()


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_plain_decoding_verifies_forced_tokens(completion: type[Completion]) -> None:
    """JSON takes fewer steps than tokens; a batch in which nothing is forced decodes one token per step."""
    shape = Shape(completion=completion, grammars=tiny_compiler(), page_size=4, step=with_forced_tokens)
    with NodeCluster(shape) as cluster:
        free = cluster.submit(prompt_of(9), 20)
        cluster.run()
        decode, verify, _ = (graphs.forward.graphs.counters for graphs in cluster.decode.steps.graphs)
        assert not any(cluster.decode.link.counters.phase_seconds.values())
        assert not verify.replays
        assert not verify.fallbacks
        calls = [submit(cluster, "record", 9), submit(cluster, "record", 17, seed=5, **RANDOM)]
        cluster.run()
        alone = cluster.decode.link.counters
        calls += [submit(cluster, "words", 12), cluster.submit(prompt_of(9), 30, seed=3, **RANDOM)]
        calls.append(submit(cluster, "record", 9, logprobs=2))
        cluster.run()
        expect_reference(free, *calls)
        cluster.settle()
        counters = cluster.decode.link.counters
    assert verify.replays.total() > 0
    assert set(verify.fallbacks) <= {"too_large"}
    assert decode.replays.total() > 20
    assert alone.steps - 19 < max(len(call.ids) for call in calls[:2]) - 10
    assert counters.phase_seconds["verify"] > 0
    assert counters.spec_forced_tokens >= counters.spec_accepted_forced > 20
    assert counters.spec_drafts == counters.spec_draft_tokens == 0


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_larger_batches_verify_fewer_forced_tokens(completion: type[Completion]) -> None:
    """More than five requests: up to three tokens each, and more once requests have ended."""
    shape = Shape(completion=completion, grammars=tiny_compiler(), page_size=4, step=with_forced_tokens)
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, "record", 9 + n) for n in range(3)]
        calls += [submit(cluster, "record", 9 + n, seed=n, **RANDOM) for n in range(2)]
        calls += [cluster.submit(prompt_of(9), 60), cluster.submit(prompt_of(9), 60, seed=3, **RANDOM)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        _, wide, narrow = (graphs.forward.graphs.counters for graphs in cluster.decode.steps.graphs)
        counters = cluster.decode.link.counters
    assert narrow.replays.total() + narrow.fallbacks.total() > 0
    assert wide.replays.total() + wide.fallbacks.total() > 0
    assert counters.spec_accepted_forced > 20
    assert counters.spec_drafts == counters.spec_draft_tokens == 0


def test_retraction_between_forced_tokens() -> None:
    shape = Shape(
        page_size=4,
        decode_pool=96,
        reserved_tokens=4,
        max_running=4,
        grammars=tiny_compiler(),
        step=with_forced_tokens,
    )
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, "record", 11 + n, 40, seed=n, **SAMPLED) for n in range(4)]
        calls.append(cluster.submit(prompt_of(12), 40))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        assert cluster.decode.link.counters.spec_accepted_forced > 0
        cluster.settle()


def test_the_time_of_masks_is_announced() -> None:
    """The router must not take a node for hung that computes the masks of complex grammars."""
    with NodeCluster(Shape(grammars=tiny_compiler())) as cluster:
        calls = [submit(cluster, "numbers", 9), submit(cluster, "words", 9), cluster.submit(prompt_of(9), 30)]
        cluster.run()
        expect_reference(*calls)
        assert 2 * SLOWEST_MASK in cluster.decode.link.announced
        assert 3 * SLOWEST_MASK not in cluster.decode.link.announced
        cluster.settle()
