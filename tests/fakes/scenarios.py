"""What many tests ask of a NodeCluster, and what they expect: plain decoding's tokens, whatever happens between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.tiny_model import VOCAB, reference

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 20}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(VOCAB), k=length)


def expect_reference(*calls: Call) -> None:
    for call in calls:
        assert call.error is None, call.error
        assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling), call.sampling


def expect_retraction(shape: Shape, greedy: int = 3) -> None:
    """Three sampled requests and some greedy ones that do not fit side by side: they all end as if they did."""
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt_of(10 + n, n), 40, seed=n, **SAMPLED) for n in range(3)]
        calls += [cluster.submit(prompt_of(11 + n, n), 40) for n in range(greedy)]
        cluster.run()
        expect_reference(*calls)
        assert cluster.decode.link.counters.retractions > 0
        assert not cluster.failures
        cluster.settle()


def lose_decode(cluster: NodeCluster, call: Call) -> None:
    """The request's decode node dies, and another one goes on with the same text."""
    lost = call.decode
    cluster.kill(lost)
    cluster.lose(lost)
    cluster.run()
    expect_reference(call)
    assert call.attempts == 2
    cluster.settle()


def expect_migration(shape: Shape, said: int) -> None:
    """The decode node is lost once so many tokens are out; another one of the `shape` goes on."""
    with NodeCluster(shape) as cluster:
        call = cluster.submit(prompt_of(18), 20, seed=5, **SAMPLED)
        cluster.run(until=lambda: len(call.output) >= said)
        lose_decode(cluster, call)


def expect_accept_length(shape: Shape, steps: int, drafts: Callable[[list[int]], Sequence[int]]) -> None:
    """As many rounds and accepted drafts as a walk over the finished text counts, with `drafts` behind each part."""
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
