"""A mixture of experts on both nodes: every kind of prompt graph, decode graphs, and drafts for it."""

from __future__ import annotations

import functools

import pytest
import torch

from common.node.completion import Deferred
from tests.fakes.draft_models import drafting
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import MakeStep, NodeCluster, NoDraftModel, Shape
from tests.fakes.tiny_model import MIXTURE, VOCAB, tiny_model
from tests.unit.engine.paged_driver import Driver

PROMPTS = [[(7 * n + 3 * i) % VOCAB for i in range(n)] for n in (3, 20, 70)]
BUCKETS = (1, 3)
DRAFTS: dict[str, tuple[NoDraftModel, MakeStep]] = {
    "ngram": (NoDraftModel(), ngram(3, BUCKETS)),
    "standalone": drafting("standalone", 3, BUCKETS),
    "eagle3": drafting("eagle3", 3, BUCKETS),
}


@functools.cache
@torch.inference_mode()
def eager(prompt: tuple[int, ...], count: int) -> list[int]:
    """A greedy continuation; everything is recomputed for each token."""
    ids = list(prompt)
    for _ in range(count):
        driver = Driver(tiny_model(config=MIXTURE), [torch.tensor(ids)], page_size=16)
        ids.append(int(driver.run([0], [len(ids)]).logits[-1].argmax()))
    return ids[len(prompt) :]


def expect_eager(shape: Shape, fallbacks: set[str]) -> NodeCluster:
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt, 9) for prompt in PROMPTS]
        cluster.run()
        found = [[token.id for token in call.output] for call in calls]
        assert found == [eager(tuple(p), len(ids)) for p, ids in zip(PROMPTS, found, strict=True)]
        assert all(found)
        cluster.settle()
        for phase in cluster.decode.steps.graphs:
            totals = phase.forward.graphs.totals()
            assert totals.replays > 0
            assert set(totals.fallbacks) <= fallbacks
        return cluster


@pytest.mark.parametrize("graphs", ["breakable", "piecewise"])
def test_both_nodes_serve_experts_under_graphs(graphs: str) -> None:
    expect_eager(Shape(model=MIXTURE, prompt_graphs=graphs), set())


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_leave_the_tokens_as_they_are(name: str) -> None:
    draft, step = DRAFTS[name]
    expect_eager(Shape(model=MIXTURE, draft=draft, step=step, page_size=4), set())


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 1024])
def test_texts_for_every_size_of_a_chunk_with_prefix_hits(chunk: int) -> None:
    """The second time, all whole pages of a prompt but those of its last token come from the cache."""
    with NodeCluster(Shape(model=MIXTURE, chunk_tokens=chunk, completion=Deferred)) as cluster:
        for cached in ([0, 0, 0], [0, 16, 64]):
            calls = [cluster.submit(prompt, 5) for prompt in PROMPTS]
            cluster.run()
            assert [call.ids for call in calls] == [eager(tuple(prompt), 5) for prompt in PROMPTS]
            assert [call.cached_tokens for call in calls] == cached
            cluster.settle()


def test_texts_survive_retraction_and_a_lost_decode_node() -> None:
    shape = Shape(model=MIXTURE, decodes=2, decode_pool=9 * 16, reserved_tokens=0, completion=Deferred)
    prompts = [*PROMPTS, *PROMPTS]
    with NodeCluster(shape) as cluster:
        calls = [cluster.submit(prompt, 20, decode=at % 2) for at, prompt in enumerate(prompts)]
        cluster.run(lambda: cluster.decode.link.counters.retractions > 0)
        cluster.kill(cluster.decode)
        cluster.lose(cluster.decode)
        cluster.run()
        assert [call.ids for call in calls] == [eager(tuple(prompt), 20) for prompt in prompts]
        assert any(call.attempts > 1 for call in calls)
        cluster.settle()
