"""Rank 0 sends its plans to the other ranks; saves have ended when they have ended on all of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

from common.engine.sampling.sampling_plan import SamplingVariant
from common.errors import RankFailed
from common.node.overlap import Completion
from common.node.ranks.board import BoardField
from decode_node.host_parts import host_fetches
from decode_node.rank_work import DecodeRankWork
from decode_node.ranked_host import RankFetches
from decode_node.ranked_worker import RankedWorker
from decode_node.step_plan import Masks, Moves, PlannedRow, Save, StepPlan
from decode_node.step_result import Launched, StepResult, Trees
from tests.fakes.later_completion import LaterCompletion

MASKED = SamplingVariant(all_greedy=True, any_filter=False, num_logprobs=None, masked=True)


@dataclass
class RecordedLaunch:
    inner: LaterCompletion
    drawn: bool

    @property
    def completion(self) -> Completion:
        assert self.drawn, "a masked step is drawn before its completion is asked for"
        return self.inner

    def read(self) -> StepResult:
        return StepResult([])


@dataclass
class RecordingWorker:
    """Records what it applies; its saves end when they are removed from `copying`."""

    applied: list[StepPlan | Masks] = field(default_factory=list)
    copying: set[int] = field(default_factory=set)
    launches: list[RecordedLaunch] = field(default_factory=list)

    def apply(self, plan: StepPlan, /) -> Launched:
        self.applied.append(plan)
        self.copying |= {save.key for save in plan.moves.saves}
        self.launches.append(RecordedLaunch(LaterCompletion(), not plan.masked))
        return self.launches[-1]

    def unsaved(self) -> Collection[int]:
        return self.copying

    def trees(self) -> Trees:
        return Trees([(7,)], [(0,)])

    def draw(self, masks: Masks, /) -> None:
        self.applied.append(masks)
        self.launches[-1].drawn = True


class Ranks:
    """Rank 0 and one more, whose frames are held until `deliver`."""

    def __init__(self) -> None:
        self.first, self.other = RecordingWorker(), RecordingWorker()
        self.frames: list[bytes] = []
        self.saved = 0
        self.failure: RankFailed | None = None  # of a collective
        self.worker = RankedWorker(self.first, self.frames.append, lambda: self.saved, self.check)
        host = RankFetches(host_fetches(None, time.monotonic), self.show)
        self.work = DecodeRankWork(self.other, host, self.show, self.check)

    def show(self, field: BoardField, saved: int) -> None:
        assert field is BoardField.SAVED
        self.saved = saved

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def deliver(self) -> None:
        for frame in self.frames:
            self.work.apply(frame)
        self.frames.clear()


def save_plan(generation: int, *keys: int) -> StepPlan:
    saves = tuple(Save(key=key, row=1, pages=(3, 4)) for key in keys)
    return StepPlan(generation=generation, moves=Moves(saves=saves))


def step_plan(generation: int) -> StepPlan:
    rows = (PlannedRow(1, 2, None),)
    return StepPlan(generation=generation, rows=rows, sampling=SamplingVariant(True, False, None))


def test_all_ranks_apply_the_same_plans_and_masks() -> None:
    ranks = Ranks()
    rows = (PlannedRow(1, 2, None),)
    plan = StepPlan(generation=1, rows=rows, sampling=MASKED)
    masks = Masks(generation=1, rows=(0,), words=bytearray(b"\1\2\3\4"))
    launched = ranks.worker.apply(plan)
    assert ranks.worker.trees() == Trees([(7,)], [(0,)])
    ranks.worker.draw(masks)
    assert launched.completion is ranks.first.launches[0].inner
    assert launched.read() == StepResult([])
    ranks.deliver()
    assert ranks.other.applied == ranks.first.applied == [plan, masks]


def test_a_save_has_ended_when_it_has_on_all_ranks() -> None:
    ranks = Ranks()
    ranks.worker.apply(save_plan(1, 10, 11))
    ranks.worker.apply(save_plan(2, 12))
    ranks.first.copying.clear()
    assert ranks.worker.unsaved() == {10, 11, 12}, "the other rank has not begun"
    ranks.deliver()
    ranks.other.copying = {11, 12}
    assert ranks.work.turn()
    assert ranks.worker.unsaved() == {11, 12}
    ranks.other.copying = {11}
    ranks.work.turn()
    assert ranks.worker.unsaved() == {11, 12}, "they end in the order of the plans"
    ranks.other.copying.clear()
    ranks.work.turn()
    assert ranks.worker.unsaved() == set()
    ranks.worker.apply(save_plan(3, 10))
    ranks.deliver()
    ranks.other.copying.clear()
    ranks.work.turn()
    assert ranks.worker.unsaved() == {10}, "rank 0 copies still"


def test_a_rank_knows_which_plans_are_complete() -> None:
    ranks = Ranks()
    for generation in range(1, 5):
        ranks.worker.apply(step_plan(generation))
    ranks.deliver()
    assert ranks.work.completed == 2, "at most two plans are in flight"
    assert ranks.work.turn()
    ranks.other.launches[2].inner.done = True
    assert ranks.work.turn()
    assert ranks.work.completed == 3
    ranks.other.launches[3].inner.done = True
    assert not ranks.work.turn()
    assert ranks.work.completed == 4


def test_a_rank_waits_for_no_step_because_of_plans_that_set_rows() -> None:
    """Requests that arrive while a step runs get their rows from plans of their own, one after another."""
    ranks = Ranks()
    ranks.worker.apply(step_plan(1))
    for generation in range(2, 6):
        cells = Moves(cells=((generation, 0, 7),))
        ranks.worker.apply(StepPlan(generation=generation, moves=cells))
    ranks.worker.apply(step_plan(6))
    ranks.deliver()
    assert ranks.work.completed == 0
    assert not ranks.other.launches[0].inner.done
    assert [plan.generation for plan in ranks.other.applied if isinstance(plan, StepPlan)] == [*range(1, 7)]


def test_results_without_the_part_of_a_rank_are_not_read() -> None:
    """On a GPU a collective does not raise: it is checked once the plan is complete, on every rank."""
    ranks = Ranks()
    launched = ranks.worker.apply(step_plan(1))
    ranks.deliver()
    ranks.failure = RankFailed(1, "rank 1 has ended")
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        launched.read()
    ranks.other.launches[0].inner.done = True
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        ranks.work.turn()
    assert ranks.work.completed == 0
