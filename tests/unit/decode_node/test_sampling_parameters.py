"""Every sampling parameter through both nodes: the plain reference's text, whatever happens to the request."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import SamplingParams
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.covering import every_value
from tests.fakes.node_cluster import NodeCluster, Shape
from tests.fakes.sampling_cases import CASES, submit, without
from tests.fakes.scenarios import expect_reference, lose_decode, prompt_of
from tests.fakes.tiny_model import VOCAB, reference


@pytest.mark.parametrize("name", CASES)
def test_the_cases_make_a_difference(name: str) -> None:
    """Each case changes its text; otherwise the tests here would pass without the parameter."""
    sampling = SamplingParams(max_tokens=16, **{"temperature": 0.0, **CASES[name]})
    prompt = tuple(prompt_of(17))
    assert reference(prompt, sampling)[0] != reference(prompt, without(CASES[name]))[0]


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_together_in_one_batch(completion: type[Completion]) -> None:
    """The batch has plain requests too, which graphs draw as soon as they are the only ones."""
    with NodeCluster(Shape(completion=completion, max_running=6, chunk_tokens=30)) as cluster:
        calls = [submit(cluster, name, 17, 16) for name in CASES]
        calls += [submit(cluster, name, 5, 4) for name in CASES]
        calls += [cluster.submit(prompt_of(9), 20), cluster.submit(prompt_of(9), 20, temperature=0.9, seed=3)]
        cluster.run()
        calls.append(cluster.submit(prompt_of(9), 20, temperature=0.9, seed=3))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters = cluster.decode.steps.graphs[0].forward.graphs.counters
        assert any(key.variant == "logits" for key in counters.replays)
        assert any(key.variant == "random" for key in counters.replays)


def test_a_minimum_that_is_reached_costs_nothing_more() -> None:
    """Once the minimum is reached, the whole step is one graph again."""
    with NodeCluster(Shape()) as cluster:
        call = submit(cluster, "min_tokens-greedy", 17, 30, min_tokens=6, stop_token_ids=(1,))
        cluster.run()
        expect_reference(call)
        assert call.finish == "length"
        counters = cluster.decode.steps.graphs[0].forward.graphs.counters
        by_variant = {key.variant: count for key, count in counters.replays.items()}
        assert by_variant == {"logits": 5, "greedy": 24}
        cluster.settle()


@pytest.mark.parametrize(
    ("name", "completion"),
    every_value(("everything", "everything-greedy", "frequency"), (Deferred, Immediate)),
)
def test_retraction_rebuilds_the_counts(name: str, completion: type[Completion]) -> None:
    shape = Shape(page_size=4, decode_pool=64, reserved_tokens=4, completion=completion, max_running=4)
    with NodeCluster(shape) as cluster:
        more = {"min_tokens": 24, "stop_token_ids": (1, 2)}
        calls = [submit(cluster, name, 10 + n, 28, **more) for n in range(4)]
        calls.append(cluster.submit(prompt_of(11), 28))
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        cluster.settle()


@pytest.mark.parametrize("name", ["everything", "everything-greedy"])
def test_migration_rebuilds_the_counts(name: str) -> None:
    """The tail of the new attempt's prompt is output, and both nodes count it as such."""
    for k in (1, 2, 4, 7):
        with NodeCluster(Shape(page_size=4, decodes=2)) as cluster:
            call = submit(cluster, name, 18, 12, stop_token_ids=(1, 2), min_tokens=9)
            cluster.run(until=lambda call=call, k=k: len(call.output) >= k)  # type: ignore[misc]
            lose_decode(cluster, call)


def test_a_row_that_changes_hands() -> None:
    """When requests use one row one after the other, nothing of the previous one remains."""
    with NodeCluster(Shape(max_running=1)) as cluster:
        calls = [submit(cluster, name, 9, 8) for name in ("everything", "bias", "repetition", "frequency")]
        calls += [cluster.submit(prompt_of(9), 8), submit(cluster, "min_tokens", 9, 8)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": ((VOCAB, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"stop_token_ids": (VOCAB,), "min_tokens": 2},
    ],
)
@pytest.mark.parametrize("legs", ["d", "p"])
def test_tokens_outside_the_vocabulary_are_refused_by_both_nodes(wrong: dict[str, Any], legs: str) -> None:
    """They would be used as indices on the device."""
    with NodeCluster(Shape()) as cluster:
        call = cluster.submit(prompt_of(5), 4, legs=legs, **wrong)
        cluster.run()
        assert call.error is not None
        assert call.error.code == "invalid_value"


def test_a_prompt_outside_the_vocabulary_is_refused_by_the_decode_node() -> None:
    for token in (-1, VOCAB):
        with NodeCluster(Shape()) as cluster:
            call = cluster.submit([1, token], 4, legs="d", repetition_penalty=1.5)
            cluster.run()
            assert call.error is not None
            assert call.error.code == "invalid_value"
