"""Constrained requests under speculation: the reference's text for every drafter, with a mask for every node."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.draft_models import drafting
from tests.fakes.drafters import forcing
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.fakes.tiny_grammar import GRAMMARS, tiny_compiler
from tests.unit.speculative.test_sampling_parameters import DRAFTERS, expect_accepted, shape_of


def submit(cluster: NodeCluster, name: str, length: int, **more: Any) -> Call:
    return cluster.submit(prompt_of(length), 60, grammar=GRAMMARS[name], **more)


@pytest.mark.parametrize(
    ("drafter", "completion"), list(zip(DRAFTERS, itertools.cycle((Deferred, Immediate)), strict=False))
)
def test_beside_free_requests_in_one_batch(drafter: str, completion: type[Completion]) -> None:
    shape = shape_of(drafter, completion=completion, max_running=5, page_size=4, grammars=tiny_compiler())
    with NodeCluster(shape) as cluster:
        calls = [submit(cluster, name, 9) for name in GRAMMARS]
        calls += [submit(cluster, name, 17, seed=5, temperature=1.3) for name in GRAMMARS]
        calls.append(submit(cluster, "record", 12, seed=6, logprobs=2, **SAMPLED))
        calls += [cluster.submit(prompt_of(9), 30), cluster.submit(prompt_of(9), 30, seed=3, **SAMPLED)]
        cluster.run()
        expect_reference(*calls)
        assert {call.finish for call in calls[:7]} == {"stop"}
        expect_accepted(cluster, 1.01)
        cluster.settle()


def test_a_step_without_drafts() -> None:
    """Adaptive speculation falls back to it in large batches."""
    model, step = drafting("eagle3", 0)
    with NodeCluster(Shape(draft=model, step=forcing(step), grammars=tiny_compiler())) as cluster:
        calls = [submit(cluster, "record", 9), cluster.submit(prompt_of(9), 30)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "eagle3-tree", "mtp", "standalone"])
def test_forced_tokens_are_drafts(drafter: str) -> None:
    """The same text in fewer steps; free requests in the batch keep their drafts."""
    texts, steps = [], []
    model, made = DRAFTERS[drafter][0]
    for step in (made, forcing(made)):
        with NodeCluster(Shape(draft=model, step=step, page_size=4, grammars=tiny_compiler())) as cluster:
            calls = [submit(cluster, "record", 9), submit(cluster, "record", 17, seed=5, temperature=1.3)]
            calls += [submit(cluster, "words", 9), cluster.submit(prompt_of(9), 30)]
            cluster.run()
            expect_reference(*calls)
            cluster.settle()
            counters = cluster.decode.link.counters
            texts.append([call.ids for call in calls])
            steps.append(counters.steps)
            assert bool(counters.spec_forced_tokens) == (step is not made)
            assert 0.5 * counters.spec_forced_tokens <= counters.spec_accepted_forced
            assert counters.spec_accepted_forced <= counters.spec_forced_tokens
            assert counters.spec_draft_tokens > 0
    assert texts[0] == texts[1]
    assert steps[1] < steps[0]
