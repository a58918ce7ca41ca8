"""Profiles of a node: one at a time, within bounds, and beside the main loop."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.messages.node_inbox import Profile
from common.messages.router_inbox import ProfileEnded, RouterMessage
from common.node import profiles
from common.node.profiles import NodeProfiler, NoProfiler
from common.node.torch_trace import TorchTrace
from common.observability.logs import Log
from common.observability.profile_files import KEPT_FILES
from tests.fakes.no_threads import allow_no_threads
from tests.fakes.waiting import PATIENCE, until

NAME = "decode-0"


class Router:
    """Keeps what the node sends."""

    def __init__(self) -> None:
        self.sent: list[RouterMessage] = []

    def send(self, message: RouterMessage, /) -> None:
        self.sent.append(message)


class Events:
    """A recorder of steps that have `each` events."""

    def __init__(self, count: Callable[[], int], each: int = 10, size: int = 100) -> None:
        self._count = count
        self._each = each
        self._size = size
        self.events = 0

    def start(self) -> None:
        self._began = self._count()

    def stop(self) -> int:
        self.events = (self._count() - self._began) * self._each
        return self.events

    def save(self, file: Path) -> None:
        file.write_text(json.dumps({"events": self.events, "rest": "x" * self._size}))


class LookClock:
    """Stands for `time` in profiles.py: the profiler's thread, which waits for steps, sleeps for exactly one step."""

    def __init__(self) -> None:
        self._sleeps = self._answered = 0

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self._sleeps += 1
        until(lambda: self._answered == self._sleeps)

    @property
    def sleeping(self) -> bool:
        return self._answered != self._sleeps

    def wake(self) -> None:
        self._answered += 1


@pytest.fixture
def look_clock(monkeypatch: pytest.MonkeyPatch) -> LookClock:
    made = LookClock()
    monkeypatch.setattr(profiles, "time", made)
    return made


class Loop:
    """A main loop that turns every millisecond, until the profiler has answered.

    Each turn is a step. With a `look_clock` only those are in which the profiler's thread sleeps, so that the number of
    steps does not depend on how late this thread runs.
    """

    def __init__(
        self,
        directory: Path,
        each: int = 10,
        size: int = 100,
        recording: threading.Lock | None = None,
        look_clock: LookClock | None = None,
    ) -> None:
        self.steps, self.router = 0, Router()
        self._look_clock = look_clock
        self.profiler = NodeProfiler(
            NAME,
            lambda: directory,
            lambda: Events(lambda: self.steps, each, size),
            recording or threading.Lock(),
            Log("test"),
        )

    def run(self, seconds: float, steps: int, idle: bool = False, order: str = "a") -> ProfileEnded:
        self.profiler.begin(Profile(order=order, seconds=seconds, steps=steps), self.router)
        deadline = time.monotonic() + PATIENCE
        clock = self._look_clock
        while not self.router.sent:
            assert time.monotonic() < deadline
            asleep = clock is not None and clock.sleeping
            self.steps += asleep if clock is not None else not idle
            self.profiler.turn(self.steps)
            if clock is not None and asleep:
                clock.wake()
            time.sleep(0.001)
        ended = self.router.sent.pop()
        assert isinstance(ended, ProfileEnded)
        assert ended.order == order
        return ended


def content(ended: ProfileEnded) -> dict[str, int]:
    with gzip.open(ended.path) as file:
        found: dict[str, int] = json.load(file)
        return found


def test_a_profile_ends_after_its_steps(tmp_path: Path, look_clock: LookClock) -> None:
    ended = Loop(tmp_path, look_clock=look_clock).run(PATIENCE, 30)
    assert ended.problem == ""
    assert ended.steps == 30
    assert content(ended)["events"] == 10 * 30
    assert ended.file_bytes == Path(ended.path).stat().st_size
    assert [each.name for each in tmp_path.iterdir()] == [Path(ended.path).name]


def test_a_profile_of_an_idle_node_ends_with_its_time(tmp_path: Path) -> None:
    ended = Loop(tmp_path).run(0.05, 30, idle=True)
    assert (ended.problem, ended.steps, content(ended)["events"]) == ("", 0, 0)
    assert ended.seconds >= 0.05


def test_steps_with_many_events_make_the_trace_shorter(tmp_path: Path, look_clock: LookClock) -> None:
    """The node stands still for some microseconds per event, so their number is bounded, not that of steps."""
    ended = Loop(tmp_path, each=profiles.MAX_EVENTS // 40, look_clock=look_clock).run(PATIENCE, 1_000)
    assert ended.steps == 40
    assert content(ended)["events"] == profiles.MAX_EVENTS


def test_the_halves_of_a_movable_node_record_one_profile_at_a_time(tmp_path: Path) -> None:
    """A second recorder of torch in a process ends the process with a segmentation fault."""
    recording = threading.Lock()
    one, other = Loop(tmp_path, recording=recording), Loop(tmp_path, recording=recording)
    one.profiler.begin(Profile(order="a", seconds=PATIENCE, steps=30), one.router)
    refused = other.run(PATIENCE, 30, order="b")
    assert (refused.busy, refused.path) == (True, "")
    one.profiler.close()
    (ended,) = one.router.sent
    assert isinstance(ended, ProfileEnded)
    assert ended.problem == ""
    assert other.run(PATIENCE, 30).problem == ""


def test_a_second_order_is_refused_while_one_runs(tmp_path: Path) -> None:
    loop, second = Loop(tmp_path), Router()
    loop.profiler.begin(Profile(order="a", seconds=PATIENCE, steps=5), loop.router)
    loop.profiler.begin(Profile(order="b", seconds=1.0, steps=5), second)
    (refused,) = second.sent
    assert isinstance(refused, ProfileEnded)
    assert (refused.order, refused.busy, refused.path) == ("b", True, "")
    loop.profiler.close()
    (ended,) = loop.router.sent
    assert isinstance(ended, ProfileEnded)
    assert Path(ended.path).exists(), "a node that ends still writes what was recorded"


def test_old_files_are_removed(tmp_path: Path) -> None:
    others = tmp_path / f"{NAME}-1-20260101T000000.000000.trace.json.gz"
    others.touch()
    loop = Loop(tmp_path)
    paths = [Path(loop.run(0.001, 1).path) for _ in range(KEPT_FILES + 2)]
    assert sorted(tmp_path.iterdir()) == sorted([others, *paths[2:]])


def test_a_new_file_is_kept_after_the_clock_was_set_back(tmp_path: Path) -> None:
    """Its name sorts before those of files that were written at a later time of day."""
    later = [tmp_path / f"{NAME}-2999010{n}T000000.000000.trace.json.gz" for n in range(1, KEPT_FILES + 1)]
    for each in later:
        each.touch()
    written = Path(Loop(tmp_path).run(0.001, 1).path)
    assert sorted(tmp_path.iterdir()) == sorted([written, *later[1:]])


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MAX_BYTES", 50)
    ended = Loop(tmp_path).run(0.001, 1)
    assert "ask for fewer steps" in ended.problem
    assert not [*tmp_path.iterdir()]


def test_a_directory_that_cannot_be_written_to_is_a_problem() -> None:
    def directory() -> Path:
        raise ConfigError("process.run_dir", "it is read-only")

    router = Router()
    profiler = NodeProfiler(NAME, directory, lambda: Events(lambda: 0), threading.Lock(), Log("test"))
    profiler.begin(Profile(order="a", seconds=1.0, steps=1), router)
    profiler.close()
    NoProfiler().begin(Profile(order="b", seconds=1.0, steps=1), router)
    first, second = router.sent
    assert isinstance(first, ProfileEnded)
    assert isinstance(second, ProfileEnded)
    assert "read-only" in first.problem
    assert "no directory" in second.problem


def test_a_profile_for_which_there_is_no_thread_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main loop goes on, and a later order is followed."""
    loop = Loop(tmp_path)
    with monkeypatch.context() as patch:
        allow_no_threads(patch)
        assert "can't start new thread" in loop.run(1.0, 1).problem
    assert loop.run(0.001, 1).problem == ""


def test_torch_records_the_operators_of_another_thread(tmp_path: Path) -> None:
    stop, began = threading.Event(), threading.Event()

    def compute() -> None:
        matrix = torch.ones(4, 4)
        while not stop.is_set():
            torch.mm(matrix, matrix)
            began.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        recorder = TorchTrace()
        recorder.start()
        # The first product that is noticed may have been computed before the start.
        for _ in range(2):
            began.clear()
            assert began.wait(PATIENCE)
        events = recorder.stop()
    finally:
        stop.set()
        thread.join()
    assert events > 0
    recorder.save(tmp_path / "trace.json")
    names = {each.get("name") for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names
