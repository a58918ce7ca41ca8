"""Steps are launched after the mark that leaves just enough time, and at once where marks cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from common.observability.logs import Log
from decode_node.pacing import LAUNCHES, MARK_SECONDS, MAX_MISSING, SLOWER, PacedCompletion, Pacing
from decode_node.step_result import StepResult

MS = 0.001
LAYERS = (2, 4, 6, 8)  # out of ten layers, a millisecond each


class _Device:
    """Runs steps of ten milliseconds, one after another, by a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps: list[tuple[float, float]] = []  # begin and length of each
        self.marked = True
        self.length = 10 * MS

    layers = LAYERS

    @property
    def value(self) -> int:
        if not self.marked:
            return 0
        count = 0
        for index in reversed(range(max(0, len(self.steps) - 4), len(self.steps))):
            begin, length = self.steps[index]
            passed = sum(self.now >= begin + layer * length / 10 for layer in LAYERS)
            count += passed
            if passed == len(LAYERS):
                return count + index * len(LAYERS)
        return count

    def clock(self) -> float:
        return self.now

    def launch(self) -> _Step:
        self.steps.append((max(self.now, self.end), self.length))
        return _Step(_Event(self, self.end))

    @property
    def end(self) -> float:
        """When the last step ends."""
        return sum(self.steps[-1]) if self.steps else 0.0

    @property
    def idle(self) -> float:
        """Seconds between steps."""
        return sum(later[0] - sum(step) for step, later in pairwise(self.steps))


@dataclass
class _Event:
    device: _Device
    end: float

    def ready(self) -> bool:
        return self.device.now >= self.end

    def due(self) -> bool:
        return True

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        assert meanwhile is not None
        while not self.ready():
            meanwhile()


@dataclass
class _Step:
    completion: _Event

    def read(self) -> StepResult:
        return StepResult([])


@dataclass
class _Loop:
    """The main loop: holds, launches, and reads the step before."""

    device: _Device = field(default_factory=_Device)
    launch_seconds: float = 1 * MS  # until the device has the forward
    rest_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.pacing = Pacing(self.device, Log("test"), self.device.clock)
        self.unread: list[PacedCompletion] = []
        self.left: list[float] = []  # work that was left when each launch began

    def tick(self) -> None:
        self.device.now += 0.1 * MS

    def step(self) -> None:
        if self.unread:
            while not self.unread[-1].due():
                self.tick()
            self.left.append(self.device.end - self.device.now)
        self.device.now += self.launch_seconds
        launched = self.device.launch()
        self.pacing.begun()
        self.device.now += self.rest_seconds
        completion = self.pacing.paced(launched).completion
        assert isinstance(completion, PacedCompletion)
        self.unread.append(completion)
        if len(self.unread) > 1:
            self.unread.pop(0).wait(self.tick)

    def drain(self) -> None:
        for completion in self.unread:
            completion.wait(self.tick)
        self.unread.clear()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def test_steps_are_launched_when_just_enough_is_left_after_the_last_mark_that_leaves_time_for_it() -> None:
    loop = _Loop()
    loop.steps(20)
    assert loop.pacing.stage == LAYERS.index(8)
    assert loop.left[-1] == pytest.approx(1.15 * MS, abs=0.1 * MS)
    loop.launch_seconds = 3 * MS
    loop.steps(20)
    assert loop.pacing.stage == LAYERS.index(6)
    assert loop.left[-1] == pytest.approx(3.15 * MS, abs=0.1 * MS)


def test_the_end_of_a_step_is_when_it_was_first_seen_to_be_over() -> None:
    """What the host does between that and the wait for the step is no work of the device."""
    loop = _Loop()
    loop.step()
    [completion], end = loop.unread, loop.device.end
    for seconds, over in ((-0.1 * MS, False), (0.1 * MS, True), (4 * MS, True)):
        loop.device.now = end + seconds
        assert completion.check_end(loop.device.now) is over
    assert (completion.running, completion.over) == (end - 0.1 * MS, end + 0.1 * MS)


def test_a_mark_that_is_seen_late_is_followed_at_once() -> None:
    loop = _Loop()
    loop.steps(20)
    loop.device.now += 6 * MS
    assert not loop.unread[-1].due()
    loop.device.now += 2.5 * MS
    assert loop.unread[-1].due(), "nobody knows how long ago it was written"


def test_the_device_does_not_run_out_of_work() -> None:
    loop = _Loop()
    loop.steps(100)
    assert loop.device.idle == pytest.approx(0.0)
    assert loop.pacing.counters.late == 0


@pytest.mark.parametrize("rest", [0.1 * MS, 0.3 * MS])
def test_what_the_host_does_after_the_launch_of_the_forward_takes_no_lead(rest: float) -> None:
    """Even if it is still at it when the step before ends."""
    loop = _Loop(rest_seconds=rest)
    loop.steps(200)
    assert loop.left[-1] == pytest.approx(1.1 * MS, abs=0.2 * MS)
    assert loop.device.idle < 200 * 0.005 * MS
    loop.device.length = 15 * MS
    loop.steps(200)
    assert loop.left[-1] == pytest.approx(1.1 * MS, abs=0.2 * MS)


def test_steps_that_are_shorter_than_a_launch_are_followed_at_once() -> None:
    loop = _Loop(launch_seconds=9.5 * MS)
    loop.steps(20)
    assert loop.pacing.stage is None


def test_one_slow_launch_does_not_make_the_next_ones_earlier() -> None:
    """They would be launched at once if it took longer than what follows the first mark."""
    loop = _Loop()
    loop.steps(LAUNCHES)
    for _ in range(4):
        loop.launch_seconds = 9.5 * MS
        loop.step()
        loop.launch_seconds = 1 * MS
        loop.steps(SLOWER + 2)
        assert max(loop.left[-SLOWER:]) < 1.6 * MS
    assert loop.pacing.counters.late == 4


def test_several_slow_launches_make_the_next_ones_earlier() -> None:
    loop = _Loop()
    loop.steps(LAUNCHES)
    loop.launch_seconds = 4.5 * MS
    loop.steps(1 + LAUNCHES // SLOWER)
    loop.launch_seconds = 1 * MS
    loop.steps(2)
    assert loop.pacing.stage is not None
    assert LAYERS[loop.pacing.stage] < 6
    loop.steps(2 * LAUNCHES)
    assert loop.pacing.stage == LAYERS.index(8), "the slow launches are forgotten"


def test_launches_are_paced_again_after_a_time_of_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late launches raise the margin until no mark leaves enough time; it must not stay there."""
    monkeypatch.setitem(globals(), "LAYERS", (5, 6, 7, 8))
    monkeypatch.setattr(_Device, "layers", LAYERS)
    loop = _Loop(launch_seconds=0.8 * MS)
    loop.device.length = 7 * MS
    for _ in range(40):
        loop.steps(29)
        loop.launch_seconds = 3.2 * MS
        loop.step()
        loop.launch_seconds = 0.8 * MS
    loop.steps(900)
    assert loop.pacing.stage is not None


def test_times_after_marks_follow_the_steps() -> None:
    loop = _Loop()
    loop.steps(20)
    loop.device.length = 4 * MS
    loop.steps(30)
    assert loop.pacing.stage == LAYERS.index(6)
    loop.device.length = 10 * MS
    loop.steps(200)
    assert loop.pacing.stage == LAYERS.index(8)


def test_steps_without_marks_are_counted_and_followed_at_once() -> None:
    loop = _Loop()
    loop.steps(20)
    loop.device.marked = False
    loop.steps(MAX_MISSING + 3)
    assert loop.pacing.counters.missing >= MAX_MISSING
    assert loop.pacing.stage is None
    assert loop.left[-1] > 7 * MS


def test_the_wait_for_a_mark_ends() -> None:
    """Even if the device never reports the end of the step."""
    loop = _Loop()
    loop.steps(20)
    loop.device.length = 1e9
    loop.step()
    begin = loop.device.now
    while not loop.unread[-1].due():
        loop.device.now += 0.1
    assert loop.device.now - begin < MARK_SECONDS + 1.0


def test_steps_that_are_not_paced_are_counted() -> None:
    loop = _Loop()
    loop.steps(20)
    loop.pacing.unpaced()
    unpaced = loop.device.launch()
    loop.drain()
    unpaced.completion.wait(loop.tick)
    loop.steps(5)
    assert loop.pacing.counters.missing == 0
    assert loop.left[-1] == pytest.approx(1.15 * MS, abs=0.1 * MS)


def test_forwards_that_are_no_steps_do_not_confuse_the_count() -> None:
    loop = _Loop()
    loop.steps(20)
    loop.device.steps.insert(0, (-1.0, 0.0))  # four more marks than steps were launched
    loop.steps(5)
    assert loop.left[-1] > 9 * MS, "too many marks look like a step that is over"
    loop.drain()
    loop.steps(5)
    assert loop.pacing.counters.missing == 0
    assert loop.left[-1] == pytest.approx(1.1 * MS, abs=0.25 * MS)
