"""Restarts of a running cluster's processes: when, how often, and what is reported. Children are scripted."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from common.observability.startup import Phase, Progress
from deploy.backoff import MAX_DELAY, STABLE_SECONDS
from deploy.children import Child
from deploy.watcher import SILENT_SECONDS, StartBounds, Watcher
from tests.fakes.clock import Clock

HANG_TIMEOUT = 900.0


@dataclass
class ScriptedChild:
    """A child as the watcher sees it; the test calls `die` and `become`."""

    name: str
    progress: Progress = field(default_factory=lambda: Progress(phase="ready"))
    exit_code: int | None = None
    reports: int = 0
    starts: int = 0
    problem: OSError | None = None
    signals: list[int] = field(default_factory=list)
    log_path: Path = Path("/run/x.log")
    launched: bool = True
    pid: int = field(default_factory=os.getpid)

    def read_progress(self) -> Progress:
        return self.progress

    def last_words(self) -> str:
        return "out of memory"

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def start(self) -> None:
        if self.problem is not None:
            raise self.problem
        self.starts += 1
        self.exit_code = None
        self.progress = Progress(phase="importing")

    def die(self, code: int) -> None:
        self.exit_code = code

    def become(self, phase: Phase, done: int = 0, total: int = 0) -> None:
        self.progress = Progress(phase=phase, done=done, total=total)
        self.reports += 1


@dataclass
class Rig:
    children: list[ScriptedChild]
    clock: Clock
    watcher: Watcher
    said: list[str]

    def check(self) -> list[str]:
        """Run one check and return its reports."""
        before = len(self.said)
        self.watcher.check(self.said.append)
        return self.said[before:]

    def run_until_started(self, child: ScriptedChild) -> float:
        """Advance the clock until the next start of `child`; return the seconds."""
        starts, begun = child.starts, self.clock()
        while child.starts == starts:
            assert self.clock() - begun < 2 * MAX_DELAY
            self.clock.now += 0.1
            self.check()
        return self.clock() - begun

    def state(self, name: str) -> str:
        return self.watcher.records()[name].state


@pytest.fixture
def rig() -> Rig:
    children = [ScriptedChild("router"), ScriptedChild("decode-0"), ScriptedChild("decode-1")]
    clock = Clock()
    rig = Rig(children, clock, Watcher(cast("list[Child]", children), HANG_TIMEOUT, clock), [])
    assert rig.check() == []
    return rig


def test_a_dead_process_is_reported_and_started_again(rig: Rig) -> None:
    child = rig.children[1]
    child.die(-signal.SIGKILL)
    (said,) = rig.check()
    assert said == (
        "decode-0 ended with signal SIGKILL (out of memory); restarting in 0.2 s; log: /run/x.log"
    )
    assert rig.state("decode-0") == "backing off"
    assert rig.watcher.records()["decode-0"].restart_at == pytest.approx(rig.clock() + 0.2)
    assert rig.check() == []
    rig.clock.now += 0.3
    assert rig.check() == [f"decode-0 was restarted (pid {os.getpid()})"]
    assert rig.state("decode-0") == "starting"
    child.become("ready")
    assert rig.check() == [f"decode-0 is up again (pid {os.getpid()})"]
    record = rig.watcher.records()["decode-0"]
    assert (record.state, record.restarts) == ("up", 1)
    assert record.last_end == "ended with signal SIGKILL (out of memory)"
    assert rig.check() == []


@pytest.mark.parametrize("code", [1, 2, -signal.SIGSEGV, 0])
def test_a_crash_loop_backs_off_and_is_never_given_up(rig: Rig, code: int) -> None:
    """This includes a process that ends with exit code 2, because a port may be taken for a moment."""
    child = rig.children[1]
    child.die(code)
    rig.check()
    delays = []
    for _ in range(100):
        delays.append(round(rig.run_until_started(child)))
        child.die(code)
        rig.check()
    assert delays[:8] == [0, 0, 1, 2, 3, 6, 13, 26]
    assert set(delays[8:]) == {30}
    assert [each.starts for each in rig.children] == [0, 100, 0]


def test_other_processes_are_watched_meanwhile(rig: Rig) -> None:
    """The delay of one process does not delay another."""
    _, loop, other = rig.children
    for _ in range(10):
        loop.die(1)
        rig.check()
        rig.run_until_started(loop)
    loop.die(1)
    rig.check()
    other.die(1)
    rig.check()
    assert rig.run_until_started(other) < 0.5
    assert rig.state("decode-0") == "backing off"


def test_a_process_that_stayed_up_is_restarted_at_once_again(rig: Rig) -> None:
    child = rig.children[1]
    for _ in range(10):
        child.die(1)
        rig.check()
        rig.run_until_started(child)
    child.become("ready")
    rig.check()
    rig.clock.now += STABLE_SECONDS
    child.die(1)
    rig.check()
    assert rig.run_until_started(child) < 0.5


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_start_that_fails_is_tried_again(rig: Rig, number: int) -> None:
    child = rig.children[1]
    child.problem = OSError(number, os.strerror(number))
    child.die(1)
    rig.check()
    rig.clock.now += 1
    (said,) = rig.check()
    assert "decode-0 failed to start" in said
    assert os.strerror(number) in said
    assert rig.state("decode-0") == "backing off"
    child.problem = None
    rig.run_until_started(child)
    assert rig.state("decode-0") == "starting"


def test_a_process_that_starts_without_progress_is_killed(rig: Rig) -> None:
    """Its start may take long in all, as long as it reports."""
    child = rig.children[1]
    child.die(1)
    rig.check()
    rig.run_until_started(child)
    for done in range(10):
        child.become("loading", done, 10)
        rig.check()
        rig.clock.now += HANG_TIMEOUT
        assert rig.check() == []
    rig.clock.now += SILENT_SECONDS + 1
    (said,) = rig.check()
    assert said == (
        "decode-0 has reported no progress for 1021 s (phase loading, 9 of 10): killing it; see /run/x.log"
    )
    assert child.signals == [signal.SIGKILL]
    assert rig.check() == []


def test_without_a_limit_a_silent_start_goes_on() -> None:
    clock = Clock()
    bounds, child = StartBounds(0.0, clock), cast(Any, ScriptedChild("decode-0"))
    assert bounds.problem(child) == ""
    clock.now += 1e9
    assert bounds.problem(child) == ""


def test_nothing_new_is_no_change(rig: Rig) -> None:
    """The table is written only when something changed."""
    quiet: Any = rig.said.append
    assert not rig.watcher.check(quiet)
    rig.children[0].die(1)
    assert rig.watcher.check(quiet)
    assert not rig.watcher.check(quiet)
