"""Tests in which order the main loop launches and finishes plans, when it waits, and how it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from common.node.completion import CudaCompletion, Deferred, Immediate, completion_for
from common.node.overlap import Completion, OverlapLoop


class Scripted:
    """A completion that is ready when the test says so."""

    def __init__(self) -> None:
        self.is_ready = False
        self.waited = 0

    def ready(self) -> bool:
        return self.is_ready

    def due(self) -> bool:
        return True

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        self.waited += 1


@dataclass
class Launch:
    name: int
    completion: Completion


class Rig:
    """A loop over scripted plans that records events: "L1" launched 1, "F1" finished 1, "-" idle."""

    def __init__(self, plans: list[int | None], completion: Callable[[], Completion]) -> None:
        self.plans = plans
        self.events: list[str] = []
        self.stop_after = 10_000
        self._completion = completion
        self.loop: OverlapLoop[int, Launch] = OverlapLoop(
            self._prepare, self._launch, self._finish, lambda: self.events.append("-"), self._stop
        )
        self.prepared = 0
        self.launches: list[Launch] = []

    def _stop(self) -> bool:
        return self.prepared >= self.stop_after

    def _prepare(self) -> int | None:
        self.prepared += 1
        return self.plans.pop(0) if self.plans else None

    def _launch(self, plan: int) -> Launch:
        self.events.append(f"L{plan}")
        self.launches.append(Launch(plan, self._completion()))
        return self.launches[-1]

    def _finish(self, launched: Launch) -> None:
        self.events.append(f"F{launched.name}")

    def turns(self, count: int) -> str:
        for _ in range(count):
            self.loop.turn()
        return " ".join(self.events)


def test_immediate_results_are_read_at_once() -> None:
    assert Rig([1, 2, 3], Immediate).turns(5) == "L1 F1 L2 F2 L3 F3 - -"


def test_deferred_results_are_read_one_step_late() -> None:
    assert Rig([1, 2, 3], Deferred).turns(5) == "L1 L2 F1 L3 F2 F3 -"


def test_a_gap_reads_what_is_in_flight_instead_of_idling() -> None:
    assert Rig([1, None, 2, None, None], Deferred).turns(5) == "L1 F1 L2 F2 -"


def test_a_device_that_finished_early_is_read_early() -> None:
    rig = Rig([1, 2], Scripted)
    assert rig.turns(1) == "L1"
    completion = rig.launches[0].completion
    assert isinstance(completion, Scripted)
    completion.is_ready = True
    assert rig.turns(1) == "L1 L2 F1"  # still launches before it reads
    assert rig.turns(1) == "L1 L2 F1 F2"


def test_there_is_never_more_than_one_unread_launch_before_the_next() -> None:
    rig = Rig(list(range(1, 20)), Deferred)
    for _ in range(19):
        rig.loop.turn()
        launched = sum(event.startswith("L") for event in rig.events)
        finished = sum(event.startswith("F") for event in rig.events)
        assert launched - finished == 1


@pytest.mark.parametrize("early", [False, True])
def test_every_launch_is_waited_for_before_it_is_read(early: bool) -> None:
    """Completions of decode steps learn from this how long steps take, also from steps that ended early."""

    def completion() -> Scripted:
        made = Scripted()
        made.is_ready = early
        return made

    rig = Rig([1, 2, None], completion)
    rig.turns(3)
    assert [
        launch.completion.waited for launch in rig.launches if isinstance(launch.completion, Scripted)
    ] == [1, 1]


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_stop_finishes_what_is_in_flight(completion: Callable[[], Completion]) -> None:
    rig = Rig([1, 2, 3, 4], completion)
    rig.stop_after = 2
    rig.loop.run()
    assert sorted(rig.events) == ["F1", "F2", "L1", "L2"]
    assert rig.plans == [3, 4]


def test_stop_ends_a_loop_that_always_has_work() -> None:
    """An expired drain deadline must end the node although a request could run forever."""
    rig = Rig(list(range(1000)), Deferred)
    rig.stop_after = 3
    rig.loop.run()
    assert rig.prepared == 3
    assert rig.events[-1] == "F2"


def test_the_end_of_a_turn_follows_its_results_and_precedes_idling() -> None:
    """What a turn reports may wait, what it has computed may not."""
    events: list[str] = []
    plans = [1, None]

    def launch(plan: int) -> Launch:
        events.append("launch")
        return Launch(plan, Immediate())

    def note(event: str) -> Callable[..., None]:
        return lambda *arguments: events.append(event)

    loop: OverlapLoop[int, Launch] = OverlapLoop(
        lambda: plans.pop(0), launch, note("finish"), note("idle"), lambda: False, after=note("after")
    )
    for _ in range(2):
        loop.turn()
    assert events == ["launch", "finish", "after", "after", "idle"]


@pytest.mark.parametrize(("completion", "waits"), [(Immediate, 0), (Deferred, 1)])
def test_only_a_wait_for_results_is_announced(completion: Callable[[], Completion], waits: int) -> None:
    announced: list[str] = []

    class Announcing:
        def begin(self, plan: int) -> None:
            announced.append("begin")

        def wait(self) -> None:
            announced.append("wait")

        def end(self) -> None:
            announced.append("end")

    plans = [1, None]
    loop: OverlapLoop[int, Launch] = OverlapLoop(
        lambda: plans.pop(0),
        lambda plan: Launch(plan, completion()),
        lambda launched: None,
        lambda: None,
        lambda: False,
        announcer=Announcing(),
    )
    for _ in range(2):
        loop.turn()
    assert announced == ["begin", *["wait"] * waits, "end"]


def test_a_loop_that_is_stopped_does_nothing() -> None:
    rig = Rig([1], Immediate)
    rig.stop_after = 0
    rig.loop.run()
    assert rig.events == []


def test_an_error_in_a_step_is_not_swallowed() -> None:
    def fail(plan: int) -> Launch:
        raise RuntimeError("device lost")

    loop: OverlapLoop[int, Launch] = OverlapLoop(
        lambda: 1, fail, lambda launched: None, lambda: None, lambda: False
    )
    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()


def test_which_completion_a_device_has() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert completion_for(cpu, one_behind=False) is Immediate
    assert completion_for(cpu, one_behind=True) is Deferred
    assert completion_for(cuda, one_behind=False) is CudaCompletion
    assert completion_for(cuda, one_behind=True) is CudaCompletion


def test_urgent_work_is_done_while_the_device_works() -> None:
    """This work runs between a launch and its results, not before and not after."""
    rig = Rig([1, 2, None, None], Scripted)
    loop: OverlapLoop[int, Launch] = OverlapLoop(
        rig._prepare, rig._launch, rig._finish, lambda: None, rig._stop, lambda: rig.events.append("w")
    )
    for _ in range(4):
        loop.turn()
    assert " ".join(rig.events) == "L1 L2 w F1 w F2"
