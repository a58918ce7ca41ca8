"""Every sampling parameter under speculation gives plain decoding's text, for every drafter and tree.

The reference knows nothing of drafts, so an ancestor that is not counted, or counted twice, changes the text. Each test
also asserts that drafts are accepted: rounds of one token would prove nothing.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.messages.generation import SamplingParams
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes import mtp_models
from tests.fakes.draft_models import branching, drafting, observed
from tests.fakes.drafters import foresight, ngram
from tests.fakes.node_cluster import Call, MakeStep, NodeCluster, NoDraftModel, Shape
from tests.fakes.sampling_cases import CASES, EVERYTHING, submit
from tests.fakes.scenarios import expect_chosen, expect_reference, prompt_of
from tests.fakes.tiny_model import reference

Made = tuple[NoDraftModel, MakeStep]
DRAFTERS: dict[str, tuple[Made, float]] = {  # with the accept length that each must reach
    "ngram": ((NoDraftModel(), ngram(4, (1, 2, 4))), 1.05),
    "always-right": ((NoDraftModel(), foresight(1.0, 8, 1)), 4.0),
    "often-right": ((NoDraftModel(), foresight(0.7, 5, 1, (2, 3))), 1.8),
    "trees": ((NoDraftModel(), foresight(0.8, 9, 4, (4,))), 1.8),
    "eagle3": (observed("eagle3", 3, 0.7, [], (1, 3)), 1.5),
    "eagle3-tree": (branching("eagle3", 3, 4, 8, None, (2, 4)), 1.01),
    "mtp": (mtp_models.observed("mtp", 3, 0.7, [], (3,)), 1.5),
    "standalone": (drafting("standalone", 3, (4,)), 1.4),
}


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def shape_of(drafter: str, **rest: object) -> Shape:
    model, step = DRAFTERS[drafter][0]
    return Shape(draft=model, step=step, **rest)  # type: ignore[arg-type]


def expect_accepted(cluster: NodeCluster, least: float) -> None:
    assert cluster.decode.link.counters.avg_spec_accept_length >= least


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_together_in_one_batch(drafter: str, completion: type[Completion]) -> None:
    with NodeCluster(shape_of(drafter, completion=completion, max_running=6, page_size=4)) as cluster:
        calls = [submit(cluster, name, 17, 16) for name in CASES]
        calls.append(cluster.submit(prompt_of(9), 20))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        expect_accepted(cluster, DRAFTERS[drafter][1])


@pytest.mark.parametrize("drafter", ["always-right", "trees", "ngram"])
def test_any_combination(drafter: str) -> None:
    rng = random.Random(drafter)

    def some(values: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < 0.5}

    with NodeCluster(shape_of(drafter, completion=Deferred, max_running=5, page_size=4)) as cluster:
        calls = [
            cluster.submit(
                prompt_of(rng.randrange(1, 30), seed),
                rng.randrange(1, 20),
                **some(
                    {
                        "temperature": [0.3, 0.9, 1.6],
                        "top_p": [0.3, 0.9],
                        "top_k": [1, 7, 30],
                        "min_p": [0.01, 0.3],
                        "repetition_penalty": [0.7, 1.1, 2.0],
                        "presence_penalty": [-2.0, 0.5],
                        "frequency_penalty": [-0.2, 2.0],
                        "logit_bias": [((4, 100.0),), ((5, -3.0), (6, 3.0)), ((0, -100.0),)],
                        "min_tokens": [1, 4, 9],
                        "stop_token_ids": [(1, 2, 4), tuple(range(40))],
                        "logprobs": [0, 3],
                    }
                ),
                seed=seed,
            )
            for seed in range(24)
        ]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize("name", ["everything", "everything-greedy"])
def test_retraction_rebuilds_the_counts(drafter: str, name: str) -> None:
    rest = {"page_size": 4, "decode_pool": 96, "reserved_tokens": 4, "max_running": 4, "completion": Deferred}
    with NodeCluster(shape_of(drafter, **rest)) as cluster:
        more = {"min_tokens": 35, "stop_token_ids": (1, 2)}
        calls = [submit(cluster, name, 10 + n, 40, **more) for n in range(4)]
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        cluster.settle()


@pytest.mark.parametrize("drafter", ["always-right", "trees"])
def test_migration_rebuilds_the_counts(drafter: str) -> None:
    for k in (1, 3, 10):
        with NodeCluster(shape_of(drafter, page_size=4, decodes=2)) as cluster:
            call = submit(cluster, "everything", 18, 24, stop_token_ids=(1, 2), min_tokens=12)
            cluster.run(until=lambda call=call, k=k: len(call.output) >= k)  # type: ignore[misc]
            lost = call.decode
            cluster.kill(lost)
            cluster.lose(lost)
            cluster.run()
            expect_reference(call)
            cluster.settle()


@pytest.mark.parametrize("drafter", ["always-right", "trees"])
def test_every_place_of_a_round(drafter: str) -> None:
    """max_tokens, min_tokens and the first stop token fall on every position of a round of eight."""
    unstopped = {**EVERYTHING, "stop_token_ids": (), "temperature": 0.0}
    said = reference(tuple(prompt_of(21)), SamplingParams(max_tokens=12, **unstopped))[0]
    with NodeCluster(shape_of(drafter, page_size=4)) as cluster:
        calls = [submit(cluster, "everything", 21, n, min_tokens=0, stop_token_ids=()) for n in range(1, 11)]
        calls += [submit(cluster, "everything-greedy", 21, 12, min_tokens=n) for n in range(11)]
        calls += [
            submit(cluster, "everything-greedy", 21, 12, stop_token_ids=(token,), min_tokens=n)
            for n, token in enumerate(said)
        ]
        cluster.run()
        expect_reference(*calls)
        assert {call.finish for call in calls} == {"stop", "length"}
        cluster.settle()
        expect_accepted(cluster, 1.5)


@pytest.mark.parametrize("name", ["everything", "everything-greedy", "min_p"])
def test_logprobs_equal_plain_decodings(drafter: str, name: str) -> None:
    """Logprobs are those of the raw logits, for every token of a round, with as many top logprobs as requested."""

    def ask(shape: Shape) -> list[Call]:
        with NodeCluster(shape) as cluster:
            calls = [submit(cluster, name, 15, 12, logprobs=n) for n in (0, 1, 5)]
            calls.append(submit(cluster, name, 16, 12))
            calls.append(submit(cluster, name, 16, 12, logprobs=2, logprob_ids=(9, 63, 0)))
            cluster.run()
            expect_reference(*calls)
            expect_chosen(*calls)
            return calls

    for found, wanted in zip(ask(shape_of(drafter)), ask(Shape())):
        for token, other in zip(found.output, wanted.output, strict=True):
            if token.logprob is None or other.logprob is None:
                assert token.logprob is other.logprob is None is found.sampling.logprobs
                continue
            assert token.logprob.top_ids == other.logprob.top_ids
            assert len(token.logprob.top_ids) == found.sampling.logprobs
            assert token.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
            assert token.logprob.top_logprobs == pytest.approx(other.logprob.top_logprobs, abs=1e-4)
