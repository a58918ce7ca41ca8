"""Threads that an unexpected exception ends, and what becomes of their process."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from common.observability.failed_threads import EXIT_THREAD_FAILED, log_failed_threads
from common.observability.logs import Log
from common.observability.loop_watchdog import HangMeter
from tests.fakes.waiting import PATIENCE

PROGRAM = """
import sys, threading, time
from common.observability import logs
from common.observability import failed_threads
from common.observability.logs import Log
from common.observability.loop_watchdog import HangMeter
logs.configure("node", "info")
with getattr(failed_threads, sys.argv[1])(Log("node")):
    thread = threading.Thread(target=HangMeter.exceeded, args=(None, 1.0, 1.0), name="pages", daemon=True)
    thread.start()
    thread.join()
    print("goes on", flush=True)
"""


class Notes(Log):
    """Keeps its errors."""

    def __init__(self) -> None:
        super().__init__("node")
        self.errors: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: object) -> None:
        self.errors.append((event, fields))


def run(context: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, context],
        timeout=PATIENCE,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_node_ends_with_a_thread_that_has_failed() -> None:
    ended = run("end_with_failed_threads")
    assert ended.returncode == EXIT_THREAD_FAILED
    assert "a thread has failed: the process ends" in ended.stderr
    assert "AttributeError" in ended.stderr
    assert not ended.stdout


def test_a_router_goes_on_and_says_so() -> None:
    ended = run("log_failed_threads")
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")
    assert "a thread has failed: restart this process when its streams have ended" in ended.stderr


def test_threads_of_libraries_are_left_to_the_hook_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    left, notes = list[threading.ExceptHookArgs](), Notes()
    monkeypatch.setattr(threading, "excepthook", left.append)
    with log_failed_threads(notes):
        for target in (int, HangMeter):
            thread = threading.Thread(target=target, args=("no number", 1, 2), name=target.__name__)
            thread.start()
            thread.join()
        thread = threading.Thread(target=HangMeter.exceeded, args=(None, 1.0, 1.0), name="pages")
        thread.start()
        thread.join()
    assert [each.thread and each.thread.name for each in left] == ["int", "HangMeter"]
    ((event, fields),) = notes.errors
    assert event.startswith("a thread has failed")
    assert fields["thread"] == "pages"
    assert "in exceeded" in str(fields["exception"])
    assert threading.excepthook == left.append
