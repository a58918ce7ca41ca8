"""A limit of reasoning tokens under speculation: drafts past the border are verified against the forced marker."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from common.messages.generation import ThinkingLimit, TokenRules
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from tests.fakes.drafters import forcing
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.scenarios import SAMPLED, expect_reference, prompt_of
from tests.unit.speculative.test_sampling_parameters import DRAFTERS, expect_accepted, shape_of

BEGIN, END = (40,), 33
ENDS = (END,), (END, 7, END)


def thinking(
    cluster: NodeCluster, length: int, tokens: int, end: tuple[int, ...] = (END,), **more: Any
) -> Call:
    rules = TokenRules(thinking=ThinkingLimit(tokens, BEGIN, end, 0))
    return cluster.submit(prompt_of(length), 40, token_rules=rules, **more)


@pytest.mark.parametrize(
    ("drafter", "completion"), list(zip(DRAFTERS, itertools.cycle((Deferred, Immediate)), strict=False))
)
def test_the_border_may_be_anywhere_in_a_round(drafter: str, completion: type[Completion]) -> None:
    """Budgets of one token after the other end at every place of a chain or a tree."""
    with NodeCluster(shape_of(drafter, completion=completion, max_running=8, page_size=4)) as cluster:
        calls = [thinking(cluster, 9, tokens, ENDS[1]) for tokens in range(8)]
        calls += [thinking(cluster, 9, tokens, ENDS[0]) for tokens in range(0, 8, 3)]
        calls += [thinking(cluster, 17, 12 + n, ENDS[n % 2], seed=n, temperature=1.3) for n in range(6)]
        calls.append(thinking(cluster, 12, 14, seed=6, logprobs=2, **SAMPLED))
        calls += [cluster.submit(prompt_of(9), 30), cluster.submit(prompt_of(9), 30, seed=3, **SAMPLED)]
        cluster.run()
        expect_reference(*calls)
        assert all(END in call.ids for call in calls[:17])
        expect_accepted(cluster, 1.01)
        cluster.settle()


@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "eagle3-tree", "mtp", "standalone"])
def test_the_forced_marker_is_a_draft(drafter: str) -> None:
    model, made = DRAFTERS[drafter][0]
    with NodeCluster(Shape(draft=model, step=forcing(made), page_size=4)) as cluster:
        calls = [thinking(cluster, 9 + tokens, 4 + tokens, end) for tokens, end in zip(range(4), ENDS * 2)]
        calls.append(cluster.submit(prompt_of(9), 30))
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters = cluster.decode.link.counters
    assert counters.spec_forced_tokens == counters.spec_accepted_forced > 0
