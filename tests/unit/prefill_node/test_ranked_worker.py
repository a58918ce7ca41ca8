"""All ranks of a prefill node apply the plans of rank 0, and results without the part of a rank are not read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from common.errors import RankFailed
from common.kv_cache.host_plan import INTACT, Damage, HostCopy, NoHostCopies, Store
from common.node.ranks.board import Board, BoardField
from common.node.ranks.ended_copies import SHOWN
from kv_transfer.send_order import SendOrder
from prefill_node import ranked_host
from prefill_node.rank_work import PromptRankWork
from prefill_node.ranked_host import OtherVerdicts, RankHost, StoredByAll
from prefill_node.ranked_worker import RankedWorker
from prefill_node.step_plan import PlannedChunk, PromptPlan
from prefill_node.step_result import PromptResult
from tests.fakes.later_completion import LaterCompletion

RESULT = PromptResult(ms=1.5)


@dataclass
class RecordedLaunch:
    completion: LaterCompletion
    damage: Damage = INTACT  # found on this rank

    def read(self) -> PromptResult:
        return RESULT if self.damage == INTACT else replace(RESULT, damage=self.damage)


@dataclass
class RecordingWorker:
    """Records what it applies and sends."""

    launches: list[RecordedLaunch] = field(default_factory=list)
    applied: list[PromptPlan] = field(default_factory=list)
    sent: list[SendOrder] = field(default_factory=list)
    grants: int = 0

    def apply(self, plan: PromptPlan, /) -> RecordedLaunch:
        self.applied.append(plan)
        self.launches.append(RecordedLaunch(LaterCompletion()))
        return self.launches[-1]

    def granted(self) -> None:
        self.grants += 1

    def send(self, order: SendOrder, /) -> None:
        self.sent.append(order)


@dataclass
class Stored(NoHostCopies):
    """Host memory of a rank, whose stores have ended but for those in `copying`."""

    copying: set[int] = field(default_factory=set)

    def unfinished(self) -> Collection[int]:
        return self.copying


class Ranks:
    """Rank 0 and another rank, which gets its plans when the test says so."""

    def __init__(self) -> None:
        self.first, self.other = RecordingWorker(), RecordingWorker()
        self.frames: list[bytes] = []
        self.failure: RankFailed | None = None  # of a collective
        self.board, self.stored = Board.create(), Stored()
        self.worker = RankedWorker(self.first, self.frames.append, OtherVerdicts(self.board, 2), self.check)
        self.work = PromptRankWork(
            self.other, RankHost(self.stored, partial(self.board.write, 1)), self.check
        )

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
    ranks.worker.granted()
    assert (ranks.first.grants, ranks.other.grants) == (1, 0), "the others get orders on their own way"
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


def loading(generation: int) -> PromptPlan:
    """Return a plan that loads pages generation and generation + 1 of the host, and a state."""
    copy = HostCopy(pages=(3, 4), host_pages=(generation, generation + 1), states=((1, generation),))
    chunk = PlannedChunk(key=7, start=32, end=34, ids=bytes(16), pages=(3, 4, 5), cached=32, load=copy)
    return PromptPlan(generation=generation, chunks=(chunk,))


def test_a_loaded_prefix_is_used_once_every_rank_has_compared_its_share() -> None:
    """Two plans are in flight. What one rank finds changed, no rank uses."""
    ranks = Ranks()
    launched = [ranks.worker.apply(each) for each in (loading(1), plan(2), loading(3))]
    ranks.deliver()
    for each in ranks.first.launches:
        each.completion.done = True
    assert [each.completion.ready() for each in launched] == [False, True, False]
    ranks.other.launches[0].damage = Damage(pages=(9,))
    for launch in ranks.other.launches:
        launch.completion.done = True
    ranks.work.turn()
    assert all(each.completion.ready() for each in launched)
    assert launched[0].read().damage == Damage(pages=(1, 2), slots=(1,))
    assert [each.read().damage for each in launched[1:]] == [INTACT, INTACT]


def test_a_verdict_replaces_that_of_an_older_plan() -> None:
    ranks = Ranks()
    for generation in range(1, 1 + 2 * SHOWN):
        launched = ranks.worker.apply(loading(generation))
        ranks.deliver()
        ranks.first.launches[-1].completion.done = ranks.other.launches[-1].completion.done = True
        damaged = generation <= SHOWN and generation % 3 == 0
        if damaged:
            ranks.other.launches[-1].damage = Damage(slots=(1,))
        ranks.work.turn()
        assert launched.completion.ready()
        assert bool(any(launched.read().damage)) is damaged


def test_a_rank_that_does_not_compare_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_host, "COMPARE_SECONDS", 0.01)
    ranks, turns = Ranks(), list[int]()
    launched = ranks.worker.apply(loading(1))
    with pytest.raises(RankFailed, match="rank 1 has not compared what it loaded for 0 s"):
        launched.completion.wait(lambda: turns.append(1))
    assert turns, "messages are processed meanwhile"


def test_pages_are_stored_once_every_rank_has_copied_them() -> None:
    ranks, copy = Ranks(), HostCopy(pages=(3,), host_pages=(8,))
    memory = StoredByAll(Stored(), lambda: ranks.board.read(1, BoardField.SAVED))
    stores = [Store(key=key, copy=copy) for key in (1, 2, 3)]
    ranks.stored.copying = {1, 2, 3}
    memory.store(stores[:2])
    ranks.worker.apply(PromptPlan(generation=1, stores=tuple(stores[:2])))
    memory.store(stores[2:])
    ranks.worker.apply(PromptPlan(generation=2, stores=tuple(stores[2:])))
    ranks.deliver()
    found = []
    for copying in ({1, 2, 3}, {1, 3}, {3}, set[int]()):
        ranks.stored.copying = copying
        assert ranks.work.turn() or not copying
        found.append(set(memory.unfinished()))
    assert found == [{1, 2, 3}, {1, 2, 3}, {3}, set()]
