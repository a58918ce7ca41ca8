"""All ranks of a prefill node apply the plans of rank 0, and results without the part of a rank are not read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from common.errors import RankFailed
from kv_transfer.send_order import SendOrder
from prefill_node.rank_work import PromptRankWork
from prefill_node.ranked_worker import RankedWorker
from prefill_node.step_plan import PlannedChunk, PromptPlan
from prefill_node.step_result import PromptResult
from tests.fakes.later_completion import LaterCompletion

RESULT = PromptResult(ms=1.5)


@dataclass
class RecordedLaunch:
    completion: LaterCompletion

    def read(self) -> PromptResult:
        return RESULT


@dataclass
class RecordingWorker:
    """Records what it applies and sends."""

    launches: list[RecordedLaunch] = field(default_factory=list)
    applied: list[PromptPlan] = field(default_factory=list)
    sent: list[SendOrder] = field(default_factory=list)

    def apply(self, plan: PromptPlan, /) -> RecordedLaunch:
        self.applied.append(plan)
        self.launches.append(RecordedLaunch(LaterCompletion()))
        return self.launches[-1]

    def send(self, order: SendOrder, /) -> None:
        self.sent.append(order)


class Ranks:
    """Rank 0 and another rank, which gets its plans when the test says so."""

    def __init__(self) -> None:
        self.first, self.other = RecordingWorker(), RecordingWorker()
        self.frames: list[bytes] = []
        self.failure: RankFailed | None = None  # of a collective
        self.worker = RankedWorker(self.first, self.frames.append, self.check)
        self.work = PromptRankWork(self.other, self.check)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def deliver(self) -> None:
        for frame in self.frames:
            self.work.apply(frame)
        self.frames.clear()


def plan(generation: int) -> PromptPlan:
    chunk = PlannedChunk(key=7, start=0, end=2, ids=bytes(16), pages=(3,))
    return PromptPlan(generation=generation, chunks=(chunk,), forget=(5,))


def test_all_ranks_apply_the_same_plans_and_send_orders_take_their_own_way() -> None:
    ranks = Ranks()
    launched = [ranks.worker.apply(plan(number)) for number in (1, 2)]
    order = SendOrder(room=7, generation=1, after=2, complete=1, first=0, pages=(3,))
    ranks.worker.send(order)
    assert ranks.first.sent == [order]
    assert len(ranks.frames) == 2
    ranks.deliver()
    assert ranks.other.applied == ranks.first.applied == [plan(1), plan(2)]
    assert [each.completion for each in launched] == [each.completion for each in ranks.first.launches]
    assert launched[0].read() == RESULT


def test_a_rank_knows_which_plans_are_complete() -> None:
    ranks = Ranks()
    for number in (1, 2):
        ranks.worker.apply(plan(number))
    ranks.deliver()
    assert ranks.work.completed == 0
    ranks.other.launches[0].completion.done = True
    ranks.work.turn()
    assert ranks.work.completed == 1


def test_results_without_the_part_of_a_rank_are_not_read() -> None:
    """On a GPU a collective does not raise: it is checked once the plan is complete, on every rank."""
    ranks = Ranks()
    launched = ranks.worker.apply(plan(1))
    ranks.deliver()
    ranks.failure = RankFailed(1, "rank 1 has ended")
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        launched.read()
    ranks.other.launches[0].completion.done = True
    with pytest.raises(RankFailed, match="rank 1 has ended"):
        ranks.work.turn()
    assert ranks.work.completed == 0
