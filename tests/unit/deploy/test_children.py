"""Child processes of the supervisor: progress, logs, exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.process_entry import entry
from deploy.children import TAIL_BYTES, Child, describe_exit
from tests.fakes.descriptors import open_descriptors
from tests.fakes.waiting import PATIENCE, until

PROGRAM = """
import argparse, os, signal, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("script")
parser.add_argument("--status-fd", type=int)
arguments = parser.parse_args()
def say(text):
    os.write(arguments.status_fd, text.encode(errors="surrogateescape"))
exec(arguments.script)
"""
# Its message ends within a character.
BROKEN_TEXT = '{"phase":"failed","message":"\udcc3"}'


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Child]]:
    """Make a child that runs a script in which say() writes to the supervisor's descriptor."""
    (tmp_path / "scripted.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made: list[Child] = []

    def child(script: str) -> Child:
        made.append(Child(f"child-{len(made)}", ["scripted", script], tmp_path / f"{len(made)}.log"))
        return made[-1]

    yield child
    for each in made:
        if each.launched:
            each.stop(0)
            until(lambda: each.read_progress() and not each.may_report)  # noqa: B023


def test_progress_is_read_line_by_line(make: Callable[[str], Child], tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    child = make(
        """say('{"phase":"loading","done":1,"total":4}\\n{"phase":"load')\n"""
        f"""while not os.path.exists({str(go_on)!r}): time.sleep(0.005)\n"""
        """say('ing","done":3,"total":4}\\n')"""
    )
    assert not child.launched
    child.start()
    assert child.launched
    assert child.progress.phase == "importing"
    until(lambda: child.read_progress().done == 1)
    go_on.touch()
    until(lambda: child.read_progress().done == 3)
    assert (child.progress.phase, child.progress.total) == ("loading", 4)


@pytest.mark.parametrize("line", ["", "nonsense", '{"phase":"dancing"}', "[]", "{", BROKEN_TEXT])
def test_a_line_that_is_no_progress_is_passed_over(make: Callable[[str], Child], line: str) -> None:
    child = make(f"""say({line!r}); say('\\n{{"phase":"ready"}}\\n'); time.sleep(600)""")
    child.start()
    until(lambda: child.read_progress().phase == "ready")


def test_exit_code_and_log_are_kept(make: Callable[[str], Child]) -> None:
    child = make("print('on stdout', flush=True); print('on stderr', file=sys.stderr); sys.exit(3)")
    child.start()
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 3
    assert child.log_tail() == "on stdout\non stderr\n"


def test_stop_lets_it_finish(make: Callable[[str], Child]) -> None:
    """Sleeps are short, because a signal just before a long one would be handled after it."""
    child = make(
        """signal.signal(15, lambda n, f: sys.exit(0)); say('{"phase":"ready"}\\n')\nwhile True: time.sleep(0.01)"""
    )
    child.start()
    until(lambda: child.read_progress().phase == "ready")
    assert child.stop(PATIENCE)
    assert child.exit_code == 0
    assert child.stop(5)  # a second time: it has already ended
    child.signal(signal.SIGTERM)


def test_stop_kills_a_process_that_ignores_sigterm(make: Callable[[str], Child]) -> None:
    child = make('signal.signal(15, signal.SIG_IGN); say(\'{"phase":"ready"}\\n\'); time.sleep(600)')
    child.start()
    until(lambda: child.read_progress().phase == "ready")
    assert not child.stop(0.1)
    assert child.exit_code == -signal.SIGKILL


def test_ctrl_c_of_the_terminal_does_not_reach_it(make: Callable[[str], Child]) -> None:
    child = make("time.sleep(600)")
    child.start()
    assert os.getsid(child.pid) == child.pid


def test_a_child_can_be_started_again(make: Callable[[str], Child], tmp_path: Path) -> None:
    """The log is kept, the progress starts anew, and no descriptor leaks."""
    child = make('print(\'here\'); say(\'{"phase":"ready"}\\n{"phase":\')')
    before = open_descriptors()
    for round_ in range(1, 4):
        child.start()
        assert child.progress.phase == "importing"
        # Its status pipe is not read to the end, so the next start has to close it.
        until(lambda: child.exit_code is not None)
        assert child.log_tail() == "here\n" * round_
    until(lambda: child.read_progress().phase == "ready" and not child.may_report)
    assert not open_descriptors() - before


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "scripted.py").write_text(PROGRAM)
    code = (
        "from pathlib import Path; from deploy.children import Child; import time\n"
        f"child = Child('c', ['scripted', 'time.sleep(600)'], Path({str(tmp_path / 'log')!r})); child.start()\n"
        "print(child.pid, flush=True); time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    ) as supervisor:
        assert supervisor.stdout is not None
        child = entry(int(supervisor.stdout.readline()))
        assert child.alive
        supervisor.kill()
    until(lambda: not child.alive)


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        ("", ""),
        ("short\n", "short\n"),
        ("x" * (TAIL_BYTES - 1) + "\n", "x" * (TAIL_BYTES - 1) + "\n"),
        ("first " * 500 + "\nsecond\nthird\n", "second\nthird\n"),
        ("é" * TAIL_BYTES + "\nlast\n", "last\n"),
    ],
)
def test_log_tail_begins_with_a_whole_line(tmp_path: Path, log: str, tail: str) -> None:
    child = Child("c", [], tmp_path / "log")
    assert child.log_tail() == ""  # there is no file
    (tmp_path / "log").write_text(log)
    assert child.log_tail() == tail


def test_log_tail_of_one_long_line(tmp_path: Path) -> None:
    """A traceback is one line of JSON, and a person has to see its end."""
    (tmp_path / "log").write_text("{" + "x" * 9000 + " out of memory}\n")
    assert Child("c", [], tmp_path / "log").log_tail().endswith(" out of memory}\n")


# -- its last words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "no log line"),
        ("one\ntwo  three\n\n", "two three"),
        ('{"event":"cannot start","reason":"router.port: taken"}\n', "cannot start: router.port: taken"),
        (
            '{"event":"main loop","exception":"Traceback\\n  line\\nValueError: odd"}\n',
            "main loop: ValueError: odd",
        ),
        ('{"event":"drained"}\n', "drained"),
        ("[1, 2]\n", "[1, 2]"),
        ('{"event":"before"}\n{"event":"cut on a full di', "before"),
        ("x" * 1000 + "\n", "x" * 300 + " ..."),
    ],
)
def test_last_words(tmp_path: Path, log: str, words: str) -> None:
    (tmp_path / "log").write_text(log)
    assert Child("c", [], tmp_path / "log").last_words() == words


def test_last_words_are_the_reason_given_at_start_up(make: Callable[[str], Child]) -> None:
    child = make("""say('{"phase":"failed","message":"no such model"}\\n'); print('later', flush=True)""")
    child.start()
    until(lambda: child.exit_code is not None)
    assert child.last_words() == "no such model"


def test_what_a_killed_process_logged_last_is_not_taken_for_the_reason(make: Callable[[str], Child]) -> None:
    child = make("""print('{"event": "throughput"}', flush=True); __import__("time").sleep(60)""")
    child.start()
    until(lambda: "throughput" in child.log_tail())
    child.signal(signal.SIGKILL)
    until(lambda: child.exit_code is not None)
    assert child.last_words().startswith("killed from outside")
    assert child.start_failure().startswith("killed from outside")
    assert child.start_failure().endswith(f"; log: {child.log_path}")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            """say('{"phase":"failed","message":"no such model"}\\n'); print('later', flush=True)""",
            "no such model",
        ),
        (
            """say('{"phase":"loading","message":"reads a.bin"}\\n'); print('no memory', flush=True)""",
            "no memory\n",
        ),
    ],
)
def test_why_a_start_failed(make: Callable[[str], Child], script: str, reason: str) -> None:
    child = make(script)
    child.start()
    until(lambda: child.exit_code is not None)
    assert child.start_failure() == reason


def test_the_tail_of_a_log_that_was_just_rotated(tmp_path: Path) -> None:
    (tmp_path / "n.log").write_text("")
    (tmp_path / "n.log.1").write_text("before\n")
    assert Child("n", [], tmp_path / "n.log").log_tail() == "before\n"


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (2, "exit code 2"), (-9, "signal SIGKILL"), (-40, "signal 40")]
)
def test_exit_codes_are_explained(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_a_start_that_fails_leaves_no_descriptor(
    make: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = make("pass")
    before = open_descriptors()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        child.start()
    assert open_descriptors() == before
    monkeypatch.undo()


def test_without_a_log_it_runs_all_the_same(make: Callable[[str], Child], tmp_path: Path) -> None:
    child = make("print('lost'); sys.exit(4)")
    child.log_path = tmp_path / "missing" / "log"
    child.start()
    until(lambda: child.exit_code is not None)
    assert child.exit_code == 4
    assert child.log_problem.startswith(f"{child.log_path} cannot be opened (No such file")
    assert child.last_words() == "no log line"


def test_logs_of_an_earlier_cluster_are_removed(tmp_path: Path) -> None:
    child = Child("n", [], tmp_path / "n.log")
    child.remove_logs()
    for name in ("n.log", "n.log.1", "other.log"):
        (tmp_path / name).write_text("old\n")
    child.remove_logs()
    assert [path.name for path in tmp_path.iterdir()] == ["other.log"]
