"""Adaptive widths: a pure policy chooses, and rounds of changing width say what plain decoding says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.cuda_graph import node_graphs
from common.engine.overlap import Completion, Deferred, Immediate
from decode_node.speculative.adaptive import (
    EVERY,
    PROBE_AFTER,
    WARM_UP,
    AdaptiveStep,
    WidthPolicy,
    batches_of,
    slots_up_to,
)
from decode_node.speculative.step import SpeculativeStep, no_seconds
from tests.fakes.draft_models import eager_drafts, observed
from tests.fakes.node_cluster import MakeStep, NodeCluster, NoDraftModel, Parts, Shape
from tests.fakes.scenarios import SAMPLED, prompt_of
from tests.fakes.tiny_model import reference

Seen = list[tuple[list[int], list[int]]]


def settle(policy: WidthPolicy, batch: int, accepted: float, rounds: int = 200) -> int:
    """The width after many rounds in which `accepted` drafts, or all of fewer, were right."""
    for _ in range(rounds):
        width = policy.choose(batch)
        policy.observe(batch, width, min(accepted, width))
    return policy.choose(batch)


@pytest.mark.parametrize(
    ("batch", "accepted", "width"),
    [
        (1, 7.0, 7),
        (1, 5.2, 7),  # more than 4.5 and a quarter less: a small batch keeps its drafts
        (1, 3.0, 5),
        (1, 2.0, 3),
        (1, 0.1, 1),  # without drafts there is nothing to gain
        (8, 3.0, 3),
        (8, 0.6, 3),  # a second draft does not pay, but the first does: widths fall when that fails
        (8, 0.4, 0),
        (31, 2.9, 3),
        (32, 1.0, 1),
        (64, 5.0, 0),
        (500, 5.0, 0),
    ],
)
def test_widths_follow_what_is_accepted(batch: int, accepted: float, width: int) -> None:
    """spec/speculation.md 3.9, algorithms.md 6.16."""
    assert settle(WidthPolicy(slots_up_to(7)), batch, accepted) == width


def test_nothing_is_judged_before_the_warm_up_and_then_every_few_rounds() -> None:
    policy = WidthPolicy(slots_up_to(3))
    for _ in range(WARM_UP - 1):
        assert policy.choose(9) == 3
        policy.observe(9, 3, 0.0)
    assert policy.choose(9) == 3
    policy.observe(9, 3, 0.0)
    assert policy.choose(9) == 0, "the mean of ten rounds without a hit is low enough for none"
    assert settle(WidthPolicy(slots_up_to(3)), 9, 0.0, WARM_UP + EVERY) == 0


def test_without_drafts_the_smallest_width_is_tried_again() -> None:
    policy = WidthPolicy(slots_up_to(3))
    settle(policy, 9, 0.0, WARM_UP)
    assert policy.choose(9) == 0
    for _ in range(PROBE_AFTER):
        policy.observe(9, 0, 0.0)
    assert policy.choose(9) == 1
    assert settle(policy, 9, 3.0) == 3, "and from there it rises again"


def test_slots_of_batch_sizes_do_not_disturb_each_other() -> None:
    policy = WidthPolicy(slots_up_to(5))
    settle(policy, 9, 0.0)
    assert policy.choose(1) == 5
    assert policy.choose(7) == 5


def test_a_round_of_the_width_before_says_nothing() -> None:
    """Results are read one round late."""
    policy = WidthPolicy(slots_up_to(3))
    settle(policy, 9, 0.0, WARM_UP)
    for _ in range(PROBE_AFTER - 1):
        policy.observe(9, 0, 0.0)
    policy.observe(9, 3, 3.0)
    assert policy.choose(9) == 0


@given(st.integers(1, 31), st.integers(1, 300), st.data())
def test_every_choice_has_graphs(steps: int, max_running: int, data: st.DataObject) -> None:
    """Whatever was observed, the chosen width exists and is captured for the batch; the widest is `steps`."""
    slots = slots_up_to(steps)
    captured, policy = batches_of(slots, max_running), WidthPolicy(slots)
    assert max(captured) == steps
    for batch in data.draw(st.lists(st.integers(1, max_running), max_size=8)):
        width = settle(policy, batch, data.draw(st.floats(0, 31)), 40)
        smallest, largest = captured[width]
        assert smallest <= batch <= largest


def test_what_is_captured_for_each_width() -> None:
    slots = slots_up_to(5)
    assert batches_of(slots, 48) == {5: (1, 7), 3: (1, 31), 1: (1, 48), 0: (8, 48)}
    assert batches_of(slots, 4) == {5: (1, 4), 3: (1, 4), 1: (1, 4)}


class Cycle(WidthPolicy):
    """Another width for every round."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(slots_up_to(max(widths)))
        self._widths = itertools.cycle(widths)

    def choose(self, batch: int) -> int:
        return next(self._widths)


def changing(
    name: str, widths: tuple[int, ...], seen: Seen, buckets: tuple[int, ...]
) -> tuple[NoDraftModel, MakeStep]:
    made = {width: observed(name, width, 0.7, seen, buckets) for width in set(widths)}
    model = made[max(widths)][0]

    def make(parts: Parts) -> AdaptiveStep:
        steps = {width: step(parts) for width, (_, step) in made.items()}
        assert all(isinstance(step, SpeculativeStep) for step in steps.values())
        return AdaptiveStep(steps, Cycle(widths), no_seconds())  # type: ignore[arg-type]

    return model, make


@pytest.mark.parametrize(
    ("name", "buckets", "completion"),
    [
        ("eagle3", (), Immediate),
        ("eagle3", (1, 3), Deferred),
        ("eagle", (1, 3), Immediate),
        ("standalone", (1, 3), Deferred),
    ],
)
def test_tokens_and_drafts_do_not_depend_on_the_widths_before(
    name: str, buckets: tuple[int, ...], completion: type[Completion]
) -> None:
    """Widths change between rounds, 0 included: draft KV and relay rows serve whatever comes next."""
    seen: Seen = []
    model, step = changing(name, (3, 0, 1, 5, 0, 0, 3), seen, buckets)
    with NodeCluster(Shape(draft=model, step=step, page_size=4, completion=completion)) as cluster:
        calls = [cluster.submit(prompt_of(n), 14) for n in (2, 17)]
        calls += [cluster.submit(prompt_of(n), 10, seed=n, **SAMPLED) for n in (3, 20)]
        cluster.run()
        for call in calls:
            assert call.error is None, call.error
            assert (call.ids, call.finish) == reference(tuple(call.prompt), call.sampling)
        cluster.settle()
        assert cluster.decode.link.counters.spec_accepted_tokens > 0
    assert len({len(drafts) for _, drafts in seen}) > 2
    for text, drafts in seen:
        assert drafts == eager_drafts(name, text, 5)[: len(drafts)], f"after {len(text)} tokens"


def test_the_step_learns_from_what_it_reads() -> None:
    """Random heads are hardly ever right: after the warm-up fewer drafts are verified."""
    made = {width: observed("eagle3", width, 0.0, [])[1] for width in (1, 3, 5)}
    policy = WidthPolicy(slots_up_to(5))

    def make(parts: Parts) -> AdaptiveStep:
        return AdaptiveStep({w: step(parts) for w, step in made.items()}, policy, no_seconds())  # type: ignore[misc]

    with NodeCluster(Shape(draft=observed("eagle3", 5, 0.0, [])[0], step=make)) as cluster:
        call = cluster.submit(prompt_of(5), 60)
        cluster.run()
        assert call.ids == reference(tuple(call.prompt), call.sampling)[0]
        counters = cluster.decode.link.counters
    assert policy.choose(1) == 1
    assert counters.spec_draft_tokens < 3 * counters.spec_drafts


def test_graphs_of_all_widths_are_counted_as_one_phase() -> None:
    """Row B (counters): one series for a phase, whatever widths it has; captured sizes as `batches_of` says."""
    made = {width: observed("eagle3", width, 0.0, [], (1, 3))[1] for width in (0, 2)}
    steps: list[SpeculativeStep] = []

    def make(parts: Parts) -> AdaptiveStep:
        widths = {width: step(parts) for width, step in made.items()}
        steps.extend(widths.values())  # type: ignore[arg-type]
        return AdaptiveStep(widths, Cycle((2, 0)), no_seconds())  # type: ignore[arg-type]

    with NodeCluster(Shape(draft=observed("eagle3", 2, 0.0, [])[0], step=make)) as cluster:
        call = cluster.submit(prompt_of(5), 9)
        cluster.run()
        assert call.error is None
        adaptive = cluster.decode.step
        assert isinstance(adaptive, AdaptiveStep)
        totals = node_graphs.totals(*adaptive.graphs)()
    assert [each.phase for each in totals] == ["draft", "verify", "draft_extend"]
    for each in totals:
        parts = [
            one
            for step in steps
            for graph in step.graphs
            if (one := graph.forward.graphs.totals()).phase == each.phase
        ]
        assert len(parts) == 2
        assert each.replays == sum(one.replays for one in parts) > 0
        assert each.captured == sum(one.captured for one in parts)
