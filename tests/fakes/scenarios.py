"""Scenarios for a NodeCluster and their expectation: the tokens of plain decoding, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.tiny_model import VOCAB, next_logits, reference

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 20}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def expect_reference(*calls: Call) -> None:
    for call in calls:
        assert call.error is None, call.error
        assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling), call.sampling


def expect_chosen(*calls: Call) -> None:
    """Expect the log-probabilities of the tokens that each request names, of the raw logits at each of its tokens."""
    for call in calls:
        for place, token in enumerate(call.output):
            raw = next_logits((*call.prompt, *call.ids[:place])).log_softmax(-1)[0]
            found = () if token.logprob is None else token.logprob.chosen
            assert found == pytest.approx([raw[each].item() for each in call.sampling.logprob_ids], abs=1e-4)


def expect_retraction(shape: Shape, greedy: int = 3) -> None:
    """Run three sampled and some greedy requests that do not fit together: all end as if they did."""
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, seed=n, **SAMPLED) for n in range(3)]
        calls += [cluster.submit(prompt_of(11 + n, n), 40) for n in range(greedy)]
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        assert not cluster.failures
        cluster.settle()


def expect_conversation(cluster: NodeCluster, prompt: list[int]) -> None:
    """Run three turns, each of which continues the text of the one before."""
    for turn in range(3):
        call = cluster.submit(prompt, 11)
        cluster.run()
        expect_reference(call)
        prompt = call.prompt + call.ids + prompt_of(3, turn)


def lose_decode(cluster: NodeCluster, call: Call) -> None:
    """Lose the request's decode node, so that another one continues the same text."""
    lost = call.decode
    cluster.kill(lost)
    cluster.lose(lost)
    cluster.run()
    expect_reference(call)
    assert call.attempts == 2
    cluster.settle()


def expect_migration(shape: Shape, said: int) -> None:
    """Lose the decode node after `said` tokens; another one of the `shape` continues."""
    with NodeCluster(shape) as cluster:
        call = cluster.submit(prompt_of(18), 20, seed=5, **SAMPLED)
        cluster.run(until=lambda: len(call.output) >= said)
        lose_decode(cluster, call)


def expect_accept_length(shape: Shape, steps: int, drafts: Callable[[list[int]], Sequence[int]]) -> None:
    """Expect the rounds and accepted drafts of a walk over the finished text, with `drafts` after each prefix."""
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(n), 40) for n in (5, 19, 33)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters = cluster.decode.link.counters
    rounds = accepted = 0
    for call in calls:
        done = 1
        while done < len(call.ids):
            guessed = drafts(call.prompt + call.ids[:done])
            right = 0
            while right < steps and call.ids[done + right : done + right + 1] == [guessed[right]]:
                right += 1
            rounds, accepted, done = rounds + 1, accepted + right, done + right + 1
    assert counters.spec_drafts == rounds
    assert abs(counters.spec_accepted_tokens - accepted) <= len(calls), "the last round may run over the end"
