"""A node announces no less time than a launch takes, yet little enough for a hang to be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.node import late_compilations
from common.node.announced_work import (
    FACTOR,
    FIRST_SECONDS,
    FLOOR_SECONDS,
    MAX_SECONDS,
    AnnouncedWork,
    LaunchTimes,
    Work,
)
from common.node.completion import Deferred, Immediate
from common.node.overlap import Completion, OverlapLoop
from common.observability.logs import Log
from tests.fakes.clock import Clock


def plain(tokens: int) -> Work:
    return Work.of(tokens, 0)


def test_before_anything_was_measured_there_is_time_for_first_calls_and_slow_processors() -> None:
    times = LaunchTimes()
    assert FIRST_SECONDS < times.allowance(plain(1)) < FIRST_SECONDS + 1
    assert times.allowance(plain(2048)) > FIRST_SECONDS + 2048 / 10


def test_a_small_launch_is_announced_short_after_a_large_one_was_slow() -> None:
    times = LaunchTimes()
    times.record(plain(2048), 10.0)
    times.record(plain(3), 0.01)
    assert times.allowance(plain(2)) < FLOOR_SECONDS + 0.1
    assert times.allowance(plain(2048)) >= FLOOR_SECONDS + FACTOR * 10
    assert times.allowance(plain(200)) >= FLOOR_SECONDS + FACTOR * 10, (
        "the estimate is the time of the next larger launch"
    )


def test_a_larger_launch_than_any_before_is_scaled() -> None:
    times = LaunchTimes()
    times.record(plain(16), 0.5)
    assert times.allowance(plain(2048)) >= FACTOR * 0.5 * 2048 / 16


def test_context_and_images_lengthen_an_estimate_and_never_shorten_one() -> None:
    with_context, with_images = Work.of(64, 64 * 100_000), Work.of(64, 0, extra=5_000)
    times = LaunchTimes()
    times.record(plain(64), 0.5)
    assert times.allowance(with_context) > FACTOR * 0.5 * 12
    assert times.allowance(with_images) > FACTOR * 0.5 * 70
    for fast in (with_context, with_images):  # as if the image's rows were cached
        times.record(fast, 0.001)
    assert times.allowance(plain(2048)) >= FACTOR * 0.25 * 32


def test_a_slow_launch_is_forgotten() -> None:
    times = LaunchTimes()
    times.record(plain(16), 100.0)
    assert times.allowance(plain(16)) == MAX_SECONDS
    for _ in range(100):
        times.record(plain(16), 0.01)
    assert times.allowance(plain(16)) < FLOOR_SECONDS + 0.2


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=60),
    st.floats(1e-6, 0.05),
    st.floats(0, 0.05),
)
def test_no_launch_of_a_steady_node_takes_longer_than_announced(
    sizes: list[int], per_token: float, fixed: float
) -> None:
    times = LaunchTimes()
    for size in sizes:
        seconds = fixed + per_token * size
        assert times.allowance(plain(size)) >= min(seconds, MAX_SECONDS)
        times.record(plain(size), seconds)


@dataclass
class Launch:
    completion: Completion


@dataclass
class Rig:
    """A loop whose launches take as long as the test sets; it records the announcements."""

    completion: Callable[[], Completion]
    seconds: float = 0.5
    clock: Clock = field(default_factory=Clock)
    plans: list[int] = field(default_factory=list)
    until: float = 0.0
    late: list[float] = field(default_factory=list)
    results: int = 0

    def __post_init__(self) -> None:
        work = AnnouncedWork(self._announce, plain, self.clock)
        self.loop: OverlapLoop[int, Launch] = OverlapLoop(
            self._prepare, self._launch, self._finish, lambda: None, lambda: False, announcer=work
        )

    def _prepare(self) -> int | None:
        self.until = self.clock.now  # like RouterLink.publish: announced again in every turn
        return self.plans.pop(0) if self.plans else None

    def _announce(self, seconds: float) -> None:
        self.until = max(self.until, self.clock.now + seconds)

    def _launch(self, plan: int) -> Launch:
        self.clock.now += self.seconds
        self._note()
        return Launch(self.completion())

    def _finish(self, launched: Launch) -> None:
        self.results += 1
        self.clock.now += self.seconds
        self._note()

    def _note(self) -> None:
        if self.clock.now > self.until:
            self.late.append(self.clock.now - self.until)


@pytest.mark.parametrize("completion", [Immediate, Deferred])
def test_launches_and_results_are_announced_before_they_take_time(
    completion: Callable[[], Completion],
) -> None:
    rig = Rig(completion)
    rig.plans = [64] * 30
    for _ in range(40):
        rig.loop.turn()
    assert not rig.late
    assert rig.results == 30


def test_nothing_is_announced_once_all_results_are_read() -> None:
    announced: list[float] = []
    work = AnnouncedWork(announced.append, plain, Clock())
    work.begin(64)
    work.begin(64)
    work.end()
    assert 0.0 not in announced
    work.end()
    assert announced[-1] == 0.0


def test_a_kernel_that_compiles_late_is_announced_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[[], None]] = []
    monkeypatch.setattr(late_compilations, "report_compilations", lambda report, begins: hooks.append(begins))
    announced: list[float] = []
    late_compilations.report_late_compilations(Log("test"), announced.append)
    hooks[0]()
    assert announced == [late_compilations.COMPILE_SECONDS]


def test_a_launch_that_blocks_is_late_within_seconds() -> None:
    rig = Rig(Immediate, seconds=0.01)
    rig.plans = [64] * 20
    for _ in range(20):
        rig.loop.turn()
    assert not rig.late
    rig.plans, rig.seconds = [64], 30.0
    rig.loop.turn()
    assert rig.late[0] > 30.0 - 1.5
