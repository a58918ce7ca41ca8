"""A program that does not end is ended, with everything that it started, and its output is shown."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.chaos import programs
from tests.fakes.waiting import PATIENCE, until

# Ignores SIGTERM. Its child would outlive it. Its sleeps are short, because a signal just before a long one would be
# handled after it.
PROGRAM = """
import signal, subprocess, time

def stuck():
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    while True:
        time.sleep(0.01)

signal.signal(signal.SIGTERM, lambda *signal: print("told to end", flush=True))
stuck()
"""


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_output_and_exit_code_of_a_program(tmp_path: Path) -> None:
    program = "import sys; print('said'); sys.exit(3)"
    assert programs.run_program(["-c", program], tmp_path / "output.txt", 60.0) == (3, "said\n")


def test_a_program_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # With the ends of the lines, which are written by themselves: a signal before that would be answered within a line.
    output, said_before = tmp_path / "output.txt", iter([r"^\d+\n", r"^told to end\n"])

    class Late(subprocess.Popen[bytes]):
        """Is late for the first two deadlines, however long it takes to say what it says before each."""

        def wait(self, timeout: float | None = None) -> int:
            if (line := next(said_before, None)) is None:
                return super().wait(timeout)
            until(lambda: re.search(line, output.read_text(), re.MULTILINE))
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)

    monkeypatch.setattr(programs, "LATE", ((signal.SIGTERM, 0.5), (signal.SIGABRT, PATIENCE)))
    monkeypatch.setattr(subprocess, "Popen", Late)
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run_program(["-c", PROGRAM], output, 1.5)
    said = capsys.readouterr().out
    assert "told to end" in said
    assert "Aborted" in said
    assert "in stuck" in said
    until(lambda: has_ended(said.split()[0]))
