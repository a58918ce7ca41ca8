"""Adaptive widths: rounds of changing width emit the tokens of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import pytest

from common.engine.graphs import node_graphs
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion
from common.node.stopwatch import HostStopwatch
from decode_node.request import DecodeRequest
from decode_node.speculative.step import SpeculativeStep, no_seconds
from decode_node.speculative.width_policy import WidthPolicy, classes_up_to
from decode_node.step import DecodeSteps
from decode_node.step_rules import Drafts, TextDrafts
from decode_node.steps import speculative_steps
from tests.fakes.draft_models import eager_drafts, observed
from tests.fakes.node_cluster import MakeStep, NodeCluster, NoDraftModel, Parts, Shape
from tests.fakes.scenarios import SAMPLED, prompt_of
from tests.fakes.tiny_model import reference

Seen = list[tuple[list[int], list[int]]]


class Cycle(WidthPolicy):
    """Chooses another width for every round."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(classes_up_to(max(widths)))
        self._widths = itertools.cycle(widths)

    def choose(self, batch: int) -> int:
        return next(self._widths)

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float) -> None:
        pass


class EachTold:
    """Proposes with the drafters of all widths."""

    needs_results = False

    def __init__(self, told: Iterable[TextDrafts]) -> None:
        self._told = list(told)

    def propose(self, requests: Sequence[DecodeRequest], width: int, /) -> Drafts:
        for each in self._told:
            each.propose(requests, width)
        return ()


def together(made: Mapping[int, DecodeSteps], widths: WidthPolicy) -> DecodeSteps:
    """Combine steps of one width each into steps of changing width."""
    steps = {}
    for width, each in made.items():
        (step,) = each.by_width.values()
        assert isinstance(step, SpeculativeStep)
        steps[width] = step
    told = EachTold(each.rules.drafts for each in made.values())
    return speculative_steps(steps, widths, told, no_seconds())


def changing(
    name: str, widths: tuple[int, ...], seen: Seen, buckets: tuple[int, ...]
) -> tuple[NoDraftModel, MakeStep]:
    made = {width: observed(name, width, 0.7, seen, buckets) for width in set(widths)}
    model = made[max(widths)][0]

    def make(parts: Parts) -> DecodeSteps:
        return together({width: step(parts) for width, (_, step) in made.items()}, Cycle(widths))

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
    """Widths change between rounds, including to 0: draft KV and relay rows serve any following width."""
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


class Timed(WidthPolicy):
    """Measures that every draft costs a tenth of a round."""

    def observe(self, batch: int, width: int, accepted: Sequence[int], seconds: float) -> None:
        assert seconds > 0
        super().observe(batch, width, accepted, 1 + 0.1 * width)


def test_the_step_learns_from_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are rarely right, so soon fewer drafts are verified. The stopwatch of a round is read once."""
    watches: list[HostStopwatch] = []
    seconds = HostStopwatch.seconds
    monkeypatch.setattr(HostStopwatch, "seconds", lambda watch: watches.append(watch) or seconds(watch))
    made = {width: observed("eagle3", width, 0.0, [])[1] for width in (1, 3, 5)}
    policy = Timed(classes_up_to(5))

    def make(parts: Parts) -> DecodeSteps:
        return together({width: step(parts) for width, step in made.items()}, policy)

    with NodeCluster(Shape(draft=observed("eagle3", 5, 0.0, [])[0], step=make)) as cluster:
        call = cluster.submit(prompt_of(5), 60)
        cluster.run()
        assert call.ids == reference(tuple(call.prompt), call.sampling)[0]
        counters = cluster.decode.link.counters
    assert policy.choose(1) == 1
    assert len(watches) == len(set(watches)) > 0
    assert counters.spec_draft_tokens < 3 * counters.spec_drafts


def test_graphs_of_all_widths_are_counted_as_one_phase() -> None:
    """A phase has one series of counters, whatever its widths; captured sizes are those of `batches_of`."""
    made = {width: observed("eagle3", width, 0.0, [], (1, 3))[1] for width in (0, 2)}
    steps: list[DecodeSteps] = []

    def make(parts: Parts) -> DecodeSteps:
        widths = {width: step(parts) for width, step in made.items()}
        steps.extend(widths.values())
        return together(widths, Cycle((2, 0)))

    with NodeCluster(Shape(draft=observed("eagle3", 2, 0.0, [])[0], step=make)) as cluster:
        call = cluster.submit(prompt_of(5), 9)
        cluster.run()
        assert call.error is None
        totals = node_graphs.totals(*cluster.decode.steps.graphs)()
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
