"""A request joins the step after the one during which its record arrives, and its timeline says where time went."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import zmq

import decode_node.node
import decode_node.step
from common.engine.host_copies import on_device
from common.node.completion import Deferred
from decode_node.step_plan import StepPlan
from decode_node.step_result import Launched, StepResult, Worker
from tests.fakes.drafters import ngram
from tests.fakes.node_cluster import Call, NodeCluster, Shape
from tests.fakes.plan_wire import WireWorker
from tests.fakes.scenarios import expect_reference, prompt_of
from tests.fakes.tiny_grammar import GRAMMARS, HeldCompiler

PAGE = 4
STAGES = (
    "record_sent",
    "record_seen",
    "record_accepted",
    "decode_start",
    "step_started",
    "first_decode",
)


class _RunningStep(Deferred):
    """A step that is due to be followed by the next one once `during` was called and messages were processed."""

    def __init__(self, during: Callable[[], None]) -> None:
        self._during: Callable[[], None] | None = during

    def due(self) -> bool:
        during, self._during = self._during, None
        if during is not None:
            during()
        return during is None


@dataclass(frozen=True)
class _Launched:
    inner: Launched
    completion: _RunningStep

    def read(self) -> StepResult:
        return self.inner.read()


class _TimedWorker(WireWorker):
    """Calls `during` while the next step runs, and keeps the plans."""

    def __init__(self, inner: Worker) -> None:
        super().__init__(inner)
        self.plans: list[StepPlan] = []
        self.during: Callable[[], None] = lambda: None

    def apply(self, plan: StepPlan, /) -> Launched:
        self.plans.append(plan)
        launched = super().apply(plan)
        return _Launched(launched, _RunningStep(lambda: self.during()))


class _TimedCluster(NodeCluster):
    worker: _TimedWorker

    def __enter__(self) -> _TimedCluster:
        return self

    def wrap_worker(self, worker: Worker) -> Worker:
        self.worker = _TimedWorker(worker)
        return self.worker


def _hand_over(cluster: NodeCluster, call: Call) -> None:
    """Run the prefill node until it has sent the record of a request that has pages."""
    for _ in range(20):
        if call.prefill_stages is not None:
            return
        cluster.turn_one(cluster.prefill)
    raise AssertionError("no record was sent")


def test_a_record_that_arrives_during_a_step_joins_the_next_one() -> None:
    with _TimedCluster(Shape(completion=Deferred, page_size=PAGE)) as cluster:
        first = cluster.submit(prompt_of(9, 1), 40)
        cluster.run(until=lambda: len(first.output) > 4)
        # Its prompt fills its pages, so that its first step needs one more.
        second = cluster.submit(prompt_of(PAGE, 2), 6)
        cluster.turn_one(cluster.decode)  # reserves pages
        request = cluster.decode.node.queues.transferring[second.room]

        launched = len(cluster.worker.plans)
        cluster.worker.during = lambda: _hand_over(cluster, second)
        cluster.turn_one(cluster.decode)
        cluster.worker.during = lambda: None
        joining, step = cluster.worker.plans[launched:]
        assert not joining.rows
        assert [join.row for join in joining.moves.joins] == [request.row]
        assert request.row in [row.row for row in step.rows]
        assert [page for row, page, _ in joining.moves.cells if row == request.row] == [0, 1]
        assert not step.moves, "the launch has nothing left to set"
        assert step.generation > joining.generation
        cluster.run()
        expect_reference(first, second)
        cluster.settle()


def test_a_launch_sets_no_pages_of_requests_that_were_running_before() -> None:
    """Once the results of a step are read, pages for the next but one are set while the next one runs."""
    with _TimedCluster(Shape(completion=Deferred, page_size=PAGE)) as cluster:
        first = cluster.submit(prompt_of(9, 1), 40)
        cluster.run(until=lambda: len(first.output) > 4)
        launched = len(cluster.worker.plans)
        cluster.run()
        later = cluster.worker.plans[launched:]
        set_by_launches = [plan.moves.cells for plan in later if plan.rows]
        assert not any(set_by_launches)
        assert len([plan for plan in later if not plan.rows]) == len(set_by_launches) // PAGE
        expect_reference(first)
        cluster.settle()


def test_the_rows_of_a_step_are_sent_to_the_device_only_if_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[list[int]] = []

    def recorded(values: list[int], device: torch.device) -> torch.Tensor:
        sent.append(values)
        return on_device(values, device)

    monkeypatch.setattr(decode_node.step, "on_device", recorded)
    with NodeCluster(Shape(completion=Deferred)) as cluster:
        calls = [cluster.submit(prompt_of(9, n), count) for n, count in ((1, 9), (2, 30))]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
    rows = [each for each in sent if each]
    assert len(rows) <= 4
    assert all(before != after for before, after in pairwise(rows))


def test_a_request_that_ends_between_its_row_and_its_step_leaves_its_row_to_another() -> None:
    with _TimedCluster(Shape(completion=Deferred, max_running=2), resubmit=False) as cluster:
        first = cluster.submit(prompt_of(9, 1), 40)
        cluster.run(until=lambda: len(first.output) > 4)
        second, third = cluster.submit(prompt_of(7, 2), 6), cluster.submit(prompt_of(11, 3), 6)
        cluster.turn_one(cluster.decode)  # reserves pages
        launched, apply = len(cluster.worker.plans), cluster.worker.apply

        def applied(plan: StepPlan, /) -> Launched:
            if not plan.rows:
                cluster.abort(second)
            return apply(plan)

        def hand_over() -> None:
            _hand_over(cluster, second)
            _hand_over(cluster, third)

        cluster.worker.apply = applied  # type: ignore[method-assign]
        cluster.worker.during = hand_over
        cluster.turn_one(cluster.decode)
        cluster.worker.during = lambda: None
        joining, step = cluster.worker.plans[launched:]
        rows = [join.row for plan in (joining, step) for join in plan.moves.joins]
        assert len(rows) == 2
        assert rows[0] == rows[1] == step.rows[1].row, (
            "the row was free again for the request that waited for one"
        )
        cluster.run()
        expect_reference(first, third)
        cluster.settle()


def test_a_reservation_that_arrives_during_a_step_is_granted_during_it() -> None:
    with _TimedCluster(Shape(completion=Deferred)) as cluster:
        first = cluster.submit(prompt_of(9, 1), 40)
        cluster.run(until=lambda: len(first.output) > 4)
        second = cluster.submit(prompt_of(7, 2), 6, legs="p")
        granted: list[bool] = []

        def reserve() -> None:
            if not granted:
                cluster.send_leg(second, "d")
                granted.append(False)

        cluster.worker.during = reserve
        rows = len(cluster.worker.plans)
        node, apply = cluster.decode.node, cluster.worker.apply

        def applied(plan: StepPlan, /) -> Launched:
            granted.append(second.room in node.queues.transferring)
            return apply(plan)

        cluster.worker.apply = applied  # type: ignore[method-assign]
        cluster.turn_one(cluster.decode)
        assert granted == [False, True], "the step after it was launched first"
        assert len(cluster.worker.plans) == rows + 1
        cluster.run()
        expect_reference(first, second)
        cluster.settle()


def test_an_idle_node_starts_a_request_in_the_turn_in_which_its_record_arrives() -> None:
    with _TimedCluster(Shape(completion=Deferred)) as cluster:
        call = cluster.submit(prompt_of(7, 2), 6, legs="d")
        cluster.turn(3)  # the handshake of the nodes, and the grant
        cluster.send_leg(call, "p")
        _hand_over(cluster, call)
        assert not cluster.worker.plans
        cluster.turn_one(cluster.decode)
        assert [len(plan.rows) for plan in cluster.worker.plans] == [1]
        cluster.run()
        expect_reference(call)


def _waits(cluster: NodeCluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run one turn of the decode node. Returns the milliseconds that it would have waited for a message."""
    waits: list[int] = []
    monkeypatch.setattr(decode_node.node, "IDLE_WAIT_MS", 100)
    monkeypatch.setattr(decode_node.node, "BUSY_WAIT_MS", 5)
    monkeypatch.setattr(zmq.Poller, "poll", lambda poller, timeout: waits.append(timeout) or [])
    cluster.turn_one(cluster.decode)
    monkeypatch.undo()
    return waits


def test_a_node_does_not_look_for_pages_whose_arrival_a_message_announces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The forward of a prefill node on the same host needs the processor."""
    with NodeCluster() as cluster:
        call = cluster.submit(prompt_of(7), 6, legs="d")
        cluster.turn(3)  # the handshake of the nodes, and the grant
        assert call.room in cluster.decode.node.queues.transferring
        assert _waits(cluster, monkeypatch) == [100]
        cluster.send_leg(call, "p")
        cluster.run()
        expect_reference(call)


def test_a_node_looks_often_for_a_grammar_whose_compilation_no_message_announces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = HeldCompiler()
    with NodeCluster(Shape(grammars=held)) as cluster:
        call = cluster.submit(prompt_of(7), 6, legs="d", grammar=GRAMMARS["numbers"])
        cluster.turn(3)
        cluster.send_leg(call, "p")
        held.released = True
        _hand_over(cluster, call)
        held.released = False
        cluster.turn_one(cluster.decode)
        assert cluster.decode.node.queues.arrived
        assert _waits(cluster, monkeypatch) == [5]
        held.released = True
        cluster.run()
        expect_reference(call)


def test_requests_whose_drafts_come_from_texts_share_their_steps() -> None:
    """Drafts need the results of the last step. Who arrives during a step waits for them, too."""
    with _TimedCluster(Shape(completion=Deferred, step=ngram(3), round_tokens=4)) as cluster:
        first = cluster.submit(prompt_of(9, 1), 40)
        cluster.run(until=lambda: len(first.output) > 4)
        second = cluster.submit(prompt_of(7, 2), 40)
        cluster.turn_one(cluster.decode)  # reserves pages
        launched = len(cluster.worker.plans)
        cluster.worker.during = lambda: _hand_over(cluster, second)
        cluster.run(until=lambda: len(second.output) > 8)
        rows = [len(plan.rows) for plan in cluster.worker.plans[launched:]]
        assert sorted(rows) == rows, "the requests take turns"
        assert rows[-1] == 2
        cluster.run()
        expect_reference(first, second)
        cluster.settle()


def test_the_timeline_shows_each_stage_of_the_hand_over() -> None:
    with NodeCluster(Shape(completion=Deferred)) as cluster:
        calls = [cluster.submit(prompt_of(9, n), 12) for n in range(3)]
        cluster.run()
        for call in calls:
            assert call.decode_stages is not None
            times = [call.decode_stages[stage] for stage in STAGES]
            assert times == sorted(times)


@pytest.mark.parametrize("skew", [-3600.0, -5.0, 5.0, 3600.0])
def test_the_clock_of_another_host_does_not_distort_the_timeline(
    skew: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time at which the record was sent comes from there; what the decode node saw itself bounds it."""
    monkeypatch.setattr("kv_transfer.outbound.sending_time", lambda: time.time() + skew)
    with NodeCluster(Shape(completion=Deferred)) as cluster:
        call = cluster.submit(prompt_of(9, 1), 12)
        cluster.run()
        assert call.decode_stages is not None
        times = [call.decode_stages[stage] for stage in ("reserved", "record_sent", "record_seen")]
        assert times == sorted(times)


def test_every_step_writes_its_marks() -> None:
    """Graphs, eager steps and steps of several requests do, on a CPU as on a GPU."""
    with NodeCluster(Shape(completion=Deferred, max_running=6)) as cluster:
        calls = [cluster.submit(prompt_of(9, n), 12 + n) for n in range(5)]
        cluster.run()
        expect_reference(*calls)
        cluster.settle()
        counters = cluster.decode.pacing.counters
        assert counters.steps > 12
        assert counters.missing == 0
