"""Log-probabilities of tokens that a request names: a reference's log-softmax at every token of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from common.messages.generation import TokenRules
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import Call, MakeStep, NodeCluster, Shape, autoregressive
from tests.fakes.scenarios import SAMPLED, expect_chosen, expect_reference, lose_decode, prompt_of

IDS = (5, 63, 0, 41, 5)
RANDOM: dict[str, Any] = {"temperature": 1.3}


def submit(
    cluster: NodeCluster, length: int, ids: tuple[int, ...] = IDS, most: int = 20, **more: Any
) -> Call:
    return cluster.submit(prompt_of(length), most, logprobs=0, logprob_ids=ids, **more)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
@pytest.mark.parametrize("step", [autoregressive, ngram(3)])
def test_each_request_gets_those_of_its_own_tokens(step: MakeStep, completion: type[Completion]) -> None:
    """They are those of the raw logits, beside requests with other tokens, with likeliest ones and without any."""
    with NodeCluster(Shape(step=step, completion=completion, max_running=7)) as cluster:
        calls = [
            submit(cluster, 9),
            submit(cluster, 12, (1,)),
            submit(cluster, 9, tuple(range(64)) * 2, seed=3, **RANDOM),
            cluster.submit(prompt_of(10), 20, logprobs=2),
            cluster.submit(prompt_of(9), 20),
            submit(cluster, 9, repetition_penalty=1.3, logit_bias=((5, 4.0),)),
            submit(cluster, 9, token_rules=TokenRules(tuple(range(1, 64, 2)))),
        ]
        cluster.run()
        expect_reference(*calls)
        expect_chosen(*calls)
        cluster.settle()


def test_rows_are_used_again() -> None:
    with NodeCluster(Shape(max_running=1)) as cluster:
        calls = [submit(cluster, 9), submit(cluster, 9, (7, 8)), cluster.submit(prompt_of(9), 9, logprobs=1)]
        cluster.run()
        expect_chosen(*calls)
        cluster.settle()


def test_after_a_retraction() -> None:
    shape = Shape(page_size=4, decode_pool=96, reserved_tokens=4, max_running=4)
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, 10 + n, most=40, seed=n, **SAMPLED) for n in range(4)]
        calls.append(cluster.submit(prompt_of(12), 40))
        cluster.run()
        expect_reference(*calls)
        expect_chosen(*calls)
        assert cluster.decode.link.counters.retractions > 0
        cluster.settle()


def test_on_another_node() -> None:
    with NodeCluster(Shape(page_size=4, decodes=2)) as cluster:
        call = submit(cluster, 17, seed=5, **RANDOM)
        cluster.run(until=lambda: len(call.output) >= 7)
        lose_decode(cluster, call)
        expect_chosen(call)
