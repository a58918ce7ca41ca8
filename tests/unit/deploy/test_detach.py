"""deploy/up --detach beside other commands, with a stand-in for the supervisor that it starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from common.config import load_cluster
from common.config.run_directory import run_directory
from common.process_entry import entry
from deploy import cli
from deploy.detached import SUPERVISOR_LOG
from deploy.process_table import State, Table, table_path, write_table

OTHER = 1 << 30  # no process has this pid


class StandIn:
    """A supervisor that has been started: it says `words`, then `begins`, and ends as `ends` says, one per look."""

    def __init__(
        self,
        pid: int,
        words: str = "",
        begins: Callable[[], object] = lambda: None,
        ends: tuple[int | BaseException | None, ...] = (),
    ) -> None:
        self.pid = pid
        self.calls: list[str] = []
        self._words = words
        self._begins = begins
        self._ends = list(ends)
        self._stdout = -1

    def __call__(self, command: list[str], *, stdout: Any, **options: Any) -> StandIn:
        """Take the place of Popen; like a process, keep the log open."""
        self._stdout = os.dup(stdout.fileno())
        os.write(self._stdout, self._words.encode())
        self._begins()
        return self

    def poll(self) -> int | None:
        end = self._ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    def terminate(self) -> None:
        self.calls.append("terminate")

    def wait(self) -> int:
        self.calls.append("wait")
        return 0

    def end(self) -> None:
        os.close(self._stdout)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[Callable[[StandIn], Result]]:
    started: list[StandIn] = []

    def up(supervisor: StandIn) -> Result:
        def spawn(command: list[str], **options: Any) -> StandIn:
            started.append(supervisor)
            return supervisor(command, **options)

        monkeypatch.setattr(subprocess, "Popen", spawn)
        return CliRunner().invoke(cli.app, ["up", "--detach", str(directory / "c.yaml")])

    yield up
    for each in started:
        each.end()


def make_table(directory: Path, state: State = "ready") -> None:
    """Make the table of a cluster that this process supervises."""
    table = Table(
        supervisor=entry(os.getpid()), cluster="c", url="http://127.0.0.1:9", state=state, processes={}
    )
    write_table(run_directory(load_cluster(directory / "c.yaml")), table)


def test_it_returns_once_the_cluster_of_its_own_supervisor_is_ready(
    directory: Path, start: Callable[[StandIn], Result]
) -> None:
    result = start(StandIn(os.getpid(), begins=lambda: make_table(directory)))
    assert result.exit_code == 0
    assert f"answers at http://127.0.0.1:9/v1 (supervisor pid {os.getpid()}, " in result.stderr


def test_the_cluster_of_another_supervisor_is_not_taken_for_its_own(
    directory: Path, start: Callable[[StandIn], Result]
) -> None:
    """That one was faster, and the own one is about to say so."""
    words = "this cluster is already running\n"
    result = start(StandIn(OTHER, words, lambda: make_table(directory), ends=(None, 1)))
    assert (result.exit_code, result.stderr) == (1, words)


@pytest.mark.parametrize("code", [1, 2])
def test_it_ends_with_the_exit_code_of_its_supervisor(
    directory: Path, start: Callable[[StandIn], Result], code: int
) -> None:
    words = "c.yaml: router.port: port 8000 is in use\n"
    result = start(StandIn(OTHER, words, ends=(code,)))
    assert (result.exit_code, result.stderr) == (code, words)


def test_a_cluster_that_is_being_stopped_is_not_called_running(
    directory: Path, start: Callable[[StandIn], Result]
) -> None:
    make_table(directory, "stopping")
    result = start(StandIn(OTHER))
    assert result.exit_code == 1
    assert f"this cluster is being stopped (pid {os.getpid()}); deploy/down " in result.stderr
    assert result.stderr.endswith("returns once it has ended\n")


def test_the_log_of_a_supervisor_without_a_table_is_kept(
    directory: Path, start: Callable[[StandIn], Result]
) -> None:
    """It is starting, or waits for processes of an earlier cluster."""
    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    (run_dir / SUPERVISOR_LOG).write_text("of an earlier cluster\n")
    first = StandIn(os.getpid(), "the first\n", lambda: make_table(directory))
    assert start(first).exit_code == 0
    table_path(run_dir).unlink()
    second = start(StandIn(OTHER, "the second\n", ends=(1,)))
    assert second.exit_code == 1
    assert "this cluster is being started or stopped" in second.stderr
    assert (run_dir / SUPERVISOR_LOG).read_text() == "the first\n"


def test_an_interrupted_start_leaves_no_supervisor(
    directory: Path, start: Callable[[StandIn], Result]
) -> None:
    supervisor = StandIn(OTHER, ends=(None, KeyboardInterrupt()))
    assert start(supervisor).exit_code != 0
    assert supervisor.calls == ["terminate", "wait"]
