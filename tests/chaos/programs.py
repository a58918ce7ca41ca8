"""Runs the harness as a program whose end has a deadline, and whose output is readable even if it misses it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.harness import ENV, ROOT

# What is sent to a program that is late, and the seconds until the next signal. SIGTERM ends the harness in order;
# SIGABRT writes the stacks of its threads.
LATE = ((signal.SIGTERM, 120.0), (signal.SIGABRT, 20.0), (signal.SIGKILL, 20.0))


def run_harness(directory: Path, arguments: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run `tests.chaos.run` with results in `directory`. Return (exit code, output)."""
    return run_program(
        ["-m", "tests.chaos.run", *arguments, "--directory", str(directory)],
        directory / "output.txt",
        seconds,
    )


def run_program(arguments: Sequence[str], output: Path, seconds: float) -> tuple[int, str]:
    """Run `python ARGUMENTS`. Return (exit code, output).

    Raises TimeoutExpired after `seconds`: its output is printed then, and it and all that it started have ended.
    """
    with output.open("wb") as file:
        started = subprocess.Popen(
            [sys.executable, "-u", "-X", "faulthandler", *arguments],
            cwd=ROOT,
            env=ENV,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        code = started.wait(seconds)
    except BaseException:  # also of a test that is interrupted
        _end(started)
        print(output.read_text(errors="replace"))
        raise
    return code, output.read_text(errors="replace")


def _end(started: subprocess.Popen[bytes]) -> None:
    for number, seconds in LATE:
        started.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
