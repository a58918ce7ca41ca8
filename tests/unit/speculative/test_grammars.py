"""Constrained requests under speculation: the reference's text for every drafter, with a mask for every node."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.node_cluster import Call, NodeCluster
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
