"""The processes of ranks: start-up together, plans, commands and events, and how they end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from operator import gt
from pathlib import Path
from typing import Any

import pytest

from common.descriptors import MAX_DESCRIPTORS
from common.errors import ConfigError, RankFailed
from common.node.ranks.board import BoardField
from common.node.ranks.group import RankGroup
from common.node.ranks.messages import FromRank, Gathered
from common.node.ranks.processes import RankProcesses, start_ranks
from common.node.ranks.start_channel import StartChannel
from common.node.ranks.start_watch import StartWatch
from common.node.ranks.watchdog import RankWatch
from common.observability.loop_watchdog import EXIT_HUNG
from common.observability.start_progress import StartProgress
from common.process_entry import start_time
from tests.fakes import served_forks
from tests.fakes.descriptors import open_descriptors
from tests.fakes.stopped_process import is_stopped
from tests.fakes.waiting import PATIENCE, until

ENTRY = "tests.fakes.echo_rank"


class Started:
    """A group of three ranks, and what rank 0 reports."""

    def __init__(self, directory: Path, hang_timeout: float = 0.0) -> None:
        self.directory = directory
        self.reports: list[tuple[str, int, int]] = []
        started = start_ranks(ENTRY, ["cpu"] * 3)
        assert started is not None
        self.group = RankGroup("decode-0", started, lambda *report: self.reports.append(report))
        self.group.begin([os.fsencode(directory)] * 2, "info", hang_timeout)

    def serve(self) -> None:
        self.group.report("loading", 1, 10)
        assert self.group.exchange(b"of rank 0") == (b"of rank 0", b"of rank 1", b"of rank 2")
        self.group.serve()

    def frames(self, rank: int) -> list[str]:
        file = self.directory / f"frames-{rank}"
        return file.read_text().splitlines() if file.exists() else []

    def event(self, rank: int) -> bytes:
        """Return the next event of a rank."""
        reader = self.group.events[rank - 1]
        while (event := reader.take()) is None:
            assert select.select([reader], [], [], PATIENCE)[0], "no event"
            reader.clear()
        return event


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks without importing torch again, for tests of what rank 0 does, not of how processes start or end."""
    monkeypatch.setattr("common.node.ranks.processes.subprocess", served_forks)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path)
    yield made
    made.group.close()


def test_ranks_start_serve_and_end_together(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a rank starts inherit nothing, and its table of open files need not grow."""
    monkeypatch.setattr("common.node.ranks.group.END_SECONDS", PATIENCE)
    started.serve()
    for process in started.group.processes:
        directory = Path(f"/proc/{process.pid}/fdinfo")
        passed = [each for each in directory.iterdir() if int(each.name) > 2]
        flags = [re.search(r"^flags:\s+(\d+)", each.read_text(), re.MULTILINE) for each in passed]
        assert passed
        assert all(each is not None and int(each[1], 8) & os.O_CLOEXEC for each in flags)
        places = re.search(r"^FDSize:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert places is not None
        assert int(places[1]) >= (
            MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
        )
    assert started.reports[-1] == ("loading", 11, 30)
    given = (started.directory / "given-2").read_text()
    assert given == "of rank 0, of rank 1, of rank 2"
    group = started.group
    for number in range(300):
        group.plans.send(b"plan %d" % number, PATIENCE)
    until(lambda: [group.board.read(rank, BoardField.APPLIED) for rank in (1, 2)] == [300, 300])
    assert started.frames(1) == started.frames(2) == [f"plan {number}" for number in range(300)]
    group.commands.send(b"open", PATIENCE)
    assert [started.event(rank) for rank in (1, 2)] == [b"open after 300"] * 2
    group.close()
    assert [process.returncode for process in group.processes] == [0, 0]
    group.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.usefixtures("forked")
def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    started = Started(tmp_path)
    with pytest.raises(ConfigError, match=r"decode.pool_tokens: rank [12]: there is no room"):
        started.group.exchange(b"of rank 0")
    started.group.close()
    assert all(process.wait(PATIENCE) for process in started.group.processes)


@pytest.mark.usefixtures("forked")
def test_the_reason_of_one_rank_is_found_past_the_end_of_another(tmp_path: Path) -> None:
    """Rank 1 notices in a collective that rank 2 has ended, and its end is read before what rank 2 has said."""
    (tmp_path / "refuse").touch()
    (tmp_path / "notice-1").touch()
    started = Started(tmp_path)
    until(lambda: all(process.poll() is not None for process in started.group.processes))
    with (
        pytest.raises(ConfigError, match=r"decode.pool_tokens: rank 2: there is no room"),
        started.group.starting(),
    ):
        started.group.exchange(b"of rank 0")


@pytest.mark.usefixtures("forked")
def test_ranks_that_end_stop_or_hang_are_noticed(started: Started) -> None:
    started.serve()
    group, now, overdue = started.group, 0.0, 1.0

    def watch() -> RankWatch:
        return RankWatch(
            group.processes,
            group.board,
            lambda: overdue,
            stopped_limit=0.5,
            hung_limit=0.3,
            clock=lambda: now,
        )

    def wait_for_beats() -> None:
        def beats() -> list[int]:
            return [group.board.read(rank, BoardField.BEAT) for rank in (1, 2)]

        before = beats()
        until(lambda: all(map(gt, beats(), before)))

    def problem(watch: RankWatch, looks: int, beat: bool = False) -> str | None:
        """Look this often. `beat`: both ranks show a beat between two looks."""
        nonlocal now
        for _ in range(looks):
            now += 0.1
            if (found := watch.problem()) is not None:
                return found
            if beat:
                wait_for_beats()
        return None

    one = group.processes[0].pid
    os.kill(one, signal.SIGSTOP)
    until(lambda: is_stopped(one))
    assert problem(watch(), 2) is None
    overdue = -1.0
    assert problem(watch(), 100) == "rank 1 does not run: it is stopped, or its machine is overloaded"
    os.kill(one, signal.SIGCONT)
    group.plans.send(b"hang", PATIENCE)
    until(lambda: started.frames(1) == ["hang"] == started.frames(2))
    # The announced work of rank 0 is that of all ranks.
    assert problem(watch(), 5, beat=True) is None
    overdue = 1.0
    assert problem(watch(), 50, beat=True) == "the main loop of rank 1 hangs"
    os.kill(one, signal.SIGKILL)
    group.processes[0].wait(PATIENCE)
    assert problem(watch(), 1) == "rank 1 has ended with -9"


def until_loading(group: RankGroup, rank: int) -> None:
    """Wait until a rank has shown a beat, and that it loads its model. What it shows first may be an earlier phase."""
    until(lambda: group.board.read(rank, BoardField.BEAT) > 0)
    until(lambda: group.board.read_text(rank).startswith("phase loading (5 of 10)"))


@pytest.mark.usefixtures("forked")
def test_a_rank_that_is_stopped_while_others_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it less long than for one that reads a slow disk."""
    monkeypatch.setattr("common.node.ranks.start_watch.STOPPED_SECONDS", 0.3)
    started = Started(tmp_path)
    until_loading(started.group, 1)
    os.kill(started.group.processes[0].pid, signal.SIGSTOP)
    with pytest.raises(
        RankFailed, match=r"rank 1 does not run: it is stopped.*; its start: phase loading \(5 of 10\)"
    ):
        started.serve()
    started.group.close()


@pytest.mark.usefixtures("forked")
def test_a_rank_that_ends_while_others_start(tmp_path: Path) -> None:
    # Rank 2 ends before it has given anything.
    (tmp_path / "hang-2").touch()
    started = Started(tmp_path)
    until_loading(started.group, 2)
    os.kill(started.group.processes[1].pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 2 has ended") as caught:
        started.group.exchange(b"of rank 0")
    assert caught.value.rank == 2
    started.group.close()


@pytest.mark.usefixtures("forked")
def test_a_rank_whose_loader_blocks_says_in_which_phase(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its beats go on. The ranks that wait for it may be without progress for longer."""
    (tmp_path / "hang-2").touch()
    started = Started(tmp_path, hang_timeout=1.0)
    group = started.group
    problem = (
        r"^rank 2: no progress of the start for 1 s, in phase loading \(5 of 10\), after: read layers.7; "
    )
    with pytest.raises(RankFailed, match=problem) as caught, group.starting():
        started.serve()
    assert caught.value.rank == 2
    assert [process.wait(PATIENCE) for process in group.processes] == [-signal.SIGKILL, EXIT_HUNG]
    assert "in this_loader_blocks" in capfd.readouterr().err


def test_a_rank_that_is_stopped_before_its_first_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed whether rank 0 waits for it or loads its own share of the model."""
    monkeypatch.setattr("common.node.ranks.start_watch.FIRST_BEAT_SECONDS", 0.3)
    started = start_ranks(ENTRY, ["cpu"] * 2)
    assert started is not None
    (process,) = started.processes
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: is_stopped(process.pid))
    group = RankGroup("decode-0", started, lambda *report: None)
    problem = rf"rank 1 \(process {process.pid}\) has shown no sign of life in 0 s: let it continue if it is stopped"
    with pytest.raises(RankFailed, match=problem):
        group.exchange(b"of rank 0")
    with pytest.raises(RankFailed, match=problem):
        group.report("loading", 1, 10)
    group.close()
    assert process.wait(PATIENCE) == -signal.SIGKILL


def test_a_rank_that_is_stopped_in_the_middle_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.node.ranks.group.SEND_SECONDS", 0.1)
    ranks = RankProcesses(2)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ranks.channels.append(StartChannel(near, FromRank, 1))
    group = RankGroup("decode-0", ranks, lambda *report: None)
    with far:
        far.send(b"\x10\x00")
        with pytest.raises(RankFailed, match="rank 1 has sent no message in time"):
            group.exchange(b"of rank 0")
    group.close()


def test_rank_0_waits_for_a_rank_as_long_as_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.node.ranks.group.START_SECONDS", 0.3)
    monkeypatch.setattr("common.node.ranks.group.LOOK_SECONDS", 0.02)
    ranks = RankProcesses(2)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ranks.channels.append(StartChannel(near, FromRank, 1))
    ranks.processes.append(subprocess.Popen(["sleep", "60"]))
    group = RankGroup("decode-0", ranks, lambda *report: None)
    shown = iter(range(1, 41))

    def look(watch: StartWatch) -> None:
        """Let the rank show a step at each of the first looks of rank 0."""
        group.board.write(1, BoardField.STEPS, next(shown, 40))
        group.board.write_text(1, "phase capturing")

    monkeypatch.setattr(StartWatch, "check", look)
    with far, pytest.raises(RankFailed, match=r"^rank 1 has made no progress for 0.3 s: phase capturing$"):
        group.exchange(b"of rank 0")
    assert next(shown, None) is None
    group.close()


def test_a_start_that_failed_is_explained_even_if_its_end_hangs() -> None:
    group, start = RankGroup("decode-0", RankProcesses(2), lambda *report: None), StartProgress()
    with start.current(), contextlib.suppress(ConfigError), group.starting():
        raise ConfigError("decode.pool_tokens", "there is no room")
    assert str(start).endswith("after: the start failed: decode.pool_tokens: there is no room")


def test_a_rank_that_reads_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.node.ranks.start_channel.SEND_SECONDS", 0.05)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel: StartChannel[FromRank] = StartChannel(near, FromRank, 1)
    with far, pytest.raises(RankFailed, match="^rank 1 takes no message: timed out") as caught:
        channel.send(Gathered((bytes(1 << 24),)))
    assert caught.value.rank == 1
    channel.close()


PARENT = """
import sys, time
from pathlib import Path
from tests.unit.node.ranks.test_group import Started
started = Started(Path(sys.argv[1]))
started.serve()
Path(sys.argv[1], "serving").touch()
time.sleep(3600)
"""


def test_ranks_end_with_rank_0(tmp_path: Path) -> None:
    """One of them is stopped when rank 0 is killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    until((tmp_path / "serving").exists)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (1, 2)]
    assert all(start_time(pid) is not None for pid in pids)
    os.kill(pids[0], signal.SIGSTOP)
    parent.kill()
    parent.wait(PATIENCE)
    until(lambda: [start_time(pid) for pid in pids] == [None, None])


def test_a_start_that_fails_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = len(open_descriptors())
    started = subprocess.Popen

    def refused(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(subprocess, "Popen", refused_from_now_on)
        return started(*arguments, **options)

    def refused_from_now_on(*arguments: Any, **options: Any) -> Any:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refused)
    started_ranks = RankProcesses(4)
    with pytest.raises(OSError, match="no more processes"):
        started_ranks.start(ENTRY)
    group = RankGroup("decode-0", started_ranks, lambda *report: None)
    group.close()
    assert [process.wait(PATIENCE) for process in group.processes] == [-signal.SIGKILL]
    del group
    assert len(open_descriptors()) == open_before


@pytest.mark.parametrize("module", ["prefill_node.rank", "decode_node.rank"])
def test_a_process_ends_without_a_word_if_rank_0_cannot_start(
    module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    open_before = len(open_descriptors())
    started = start_ranks(module, ["cpu"] * 2)
    assert started is not None
    started.channels[0].close()
    assert started.processes[0].wait(PATIENCE) == 1
    assert capfd.readouterr().err == ""
    started.close()
    started.own.close()
    del started
    assert len(open_descriptors()) == open_before


def test_a_killed_process_that_does_not_end_keeps_nothing_else_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_before = len(open_descriptors())
    made = Started(tmp_path)
    first, second = made.group.processes

    def hangs(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("rank", timeout or 0.0)

    monkeypatch.setattr(first, "wait", hangs)
    made.group.close()
    assert second.wait(PATIENCE) == -signal.SIGKILL
    del made
    assert len(open_descriptors()) == open_before
    monkeypatch.undo()
    assert first.wait(PATIENCE) == -signal.SIGKILL


def test_ranks_start_before_rank_0_imports_torch() -> None:
    code = "import sys, decode_node.__main__, prefill_node.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"
