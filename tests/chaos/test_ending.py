"""A run ends in bounded time: its tasks lose no cancellation, and what does not end is named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos import run
from tests.chaos.cluster import ChaosCluster, Setup
from tests.chaos.ending import EXIT_FAILED, end_task, end_tasks
from tests.chaos.experiment import Experiment
from tests.cluster.harness import ROOT
from tests.fakes.waiting import PATIENCE

PROGRAM = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from tests.chaos.ending import exit_within

begun = threading.Event()

def blocked():
    begun.set()
    time.sleep(60)

ThreadPoolExecutor(1).submit(blocked)
begun.wait()
print("written")
exit_within(0.2)
"""


class Operator:
    """Stands for the client of the admin socket: it answers, or fails, after some turns of the event loop."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def info(self) -> dict[str, Any]:
        for _ in range(3):
            await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return {"nodes": []}


@pytest.mark.parametrize("error", [None, aiohttp.ClientError("the router has ended")])
async def test_the_watch_of_a_cluster_ends_at_whatever_turn_it_is_cancelled(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ChaosCluster(tmp_path, Setup(namespaces=False), 0)
    monkeypatch.setattr(cluster, "operator", lambda: Operator(error))
    cluster.processes["router"] = router = subprocess.Popen(["sleep", "60"])
    survived = []
    for turns in range(12):
        watching = asyncio.create_task(cluster.watch())
        for _ in range(turns):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait({watching}, timeout=1.0)
        if not watching.done():
            survived.append(turns)
            watching.cancel()
    router.kill()
    router.wait(PATIENCE)
    assert not survived
    for held in cluster.held:
        held.close()


async def ignores(cancellations: float) -> None:
    while cancellations > 0:
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            cancellations -= 1


async def test_tasks_that_ignore_their_cancellation_are_cancelled_again_and_then_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.chaos.ending.AGAIN_SECONDS", 0.01)
    forgetful, deaf = asyncio.create_task(ignores(3)), asyncio.create_task(ignores(100))
    await asyncio.sleep(0)
    assert await end_tasks([forgetful], PATIENCE) == []
    (left,) = await end_tasks([deaf], 0.05)
    assert left.startswith(f"{ignores.__qualname__} at {__file__}:")
    assert await end_tasks([deaf], PATIENCE) == []


async def test_a_task_that_failed_by_itself_is_not_ended_in_silence() -> None:
    async def fails() -> None:
        raise ValueError("the watch has a defect")

    failing, endless = asyncio.create_task(fails()), asyncio.create_task(ignores(1))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="has a defect"):
        await end_task(failing)
    await end_task(endless, PATIENCE)
    assert endless.done()


def test_a_blocked_thread_does_not_keep_the_program() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ended.returncode, ended.stdout) == (EXIT_FAILED, "written\n")
    assert "did not end within 0.2 s" in ended.stderr
    assert "in blocked" in ended.stderr


def test_a_run_that_leaves_a_task_behind_fails_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end = False

    async def endless() -> None:
        while not may_end:
            try:
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                continue

    kept: list[asyncio.Task[None]] = []

    async def leave(self: Experiment) -> None:
        kept.append(asyncio.create_task(endless()))
        await asyncio.sleep(0)
        for held in self._cluster.held:
            held.close()

    def exit_within(seconds: float) -> None:
        """Called when all is written: from now on the task ends like others, and so does the program."""
        nonlocal may_end
        may_end = True

    monkeypatch.setattr(Experiment, "run", leave)
    monkeypatch.setattr(run, "exit_within", exit_within)
    monkeypatch.setattr(run, "end_tasks", lambda tasks: end_tasks(tasks, 0.05))
    code = run.main(["--seed", "1", "--no-namespaces", "--directory", str(tmp_path)])
    assert code == EXIT_FAILED
    failed = json.loads((tmp_path / "result.json").read_text())["failed"]
    assert "LeftBehind" in failed
    assert "endless at" in failed
    assert "endless at" in capsys.readouterr().out
