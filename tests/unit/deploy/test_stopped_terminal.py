"""deploy/up in a terminal that takes no output for a while, as after Ctrl-S: what it shows afterwards."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from common.config import load_cluster
from deploy.supervisor import Supervisor
from tests.architecture.source_tree import ROOT
from tests.fakes.waiting import PATIENCE

# Shows a process with the phase that each line of its input names; what follows ":" is printed as a line of text.
PROGRAM = """
import os
import sys
from pathlib import Path
from common.observability.startup import Progress
from common.observability.stderr_file import never_wait_for_readers
from deploy import cli
from deploy.children import Child

never_wait_for_readers()
sys.stdin.readline()
os.write(1, b"\\n")
with cli.StartView() as view:
    for line in sys.stdin:
        phase, _, text = line.strip().partition(":")
        if text:
            cli.say(text)
        view.show([Child("decode-0", [], Path("none"), Progress(phase=phase))])
        # rich would show what is printed
        os.write(1, b"\\n")
cli.say("all are ready")
"""

# deploy/up with a supervisor that has nothing to do. It starts with the second line of its input, so that the terminal
# can be stopped before the address is printed; each further line is a turn of its watch.
SUPERVISOR = """
import os
import sys
from pathlib import Path
import deploy.cli

class Idle:
    url, run_dir = "http://127.0.0.1:1", Path(sys.argv[1]).parent

    def __init__(self, *given):
        pass

    def start(self, show, report):
        for _ in range(2):
            sys.stdin.readline()
            os.write(1, b"\\n")

    def watch(self, report, meanwhile):
        for line in sys.stdin:
            meanwhile()
            os.write(1, b"\\n")

    def stop(self):
        pass

    request_stop = stop

deploy.cli.Supervisor = Idle
deploy.cli.main(["up", sys.argv[1]])
"""


class Start:
    """A start that is shown in a terminal."""

    def __init__(self, keyboard: int, terminal: int, commands: IO[bytes], done: IO[bytes]) -> None:
        self._keyboard, self._terminal = keyboard, terminal
        self._commands, self._done = commands, done
        self.tell("begin")

    def tell(self, line: str) -> None:
        """Let it show something, and return when it has tried to."""
        self._commands.write(line.encode() + b"\n")
        self._commands.flush()
        assert self._done.readline() == b"\n"

    def stop_output(self) -> None:
        """Act as the terminal does on Ctrl-S."""
        termios.tcflow(self._terminal, termios.TCOOFF)

    def resume_output(self) -> None:
        """Act as the terminal does on Ctrl-Q."""
        termios.tcflow(self._terminal, termios.TCOON)

    def shown(self, until: str = "") -> str:
        """Return what the terminal has shown since the last call; wait for `until`, which may come a moment later."""
        found = b""
        while select.select([self._keyboard], [], [], 0 if until.encode() in found else PATIENCE)[0]:
            found += os.read(self._keyboard, 1 << 16)
        return found.decode()

    def end(self) -> None:
        self._commands.close()
        assert not self._done.read()


@contextmanager
def started(program: str, *arguments: str) -> Iterator[Start]:
    keyboard, terminal = pty.openpty()
    # Without its own buffer, as PYTHONUNBUFFERED would have it, Python drops what the terminal does not take.
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=terminal,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            yield Start(keyboard, terminal, process.stdin, process.stdout)
            process.stdin.close()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            os.close(keyboard)
            os.close(terminal)


@pytest.fixture
def start() -> Iterator[Start]:
    with started(PROGRAM) as shown:
        yield shown


def test_bars_come_back_when_the_terminal_goes_on(start: Start) -> None:
    start.tell("importing")
    assert "importing" in start.shown("importing")
    start.stop_output()
    for _ in range(300):
        start.tell("loading")
    assert not start.shown()
    start.resume_output()
    start.tell("capturing")
    shown = start.shown("capturing")
    assert shown.count("capturing") == 1
    assert "loading" not in shown, "outdated bars need not be shown"
    start.tell("ready")
    assert "ready" in start.shown("ready")
    start.end()
    assert start.shown("all are ready").count("all are ready") == 1


def test_bars_appear_in_a_terminal_that_was_stopped_before(start: Start) -> None:
    start.stop_output()
    start.tell("importing")
    start.resume_output()
    start.tell("loading")
    assert "loading" in start.shown("loading")
    start.end()
    assert "all are ready" in start.shown("all are ready")


def test_a_line_of_text_is_shown_once_when_the_terminal_goes_on(start: Start) -> None:
    """It is said while the terminal is stopped, and so are others."""
    start.tell("importing")
    start.shown("importing")
    start.stop_output()
    for number in range(3):
        start.tell(f"loading:line {number} of three")
    start.resume_output()
    start.tell("loading:another line")
    shown = start.shown("another line")
    assert [shown.count(f"line {number} of three") for number in range(3)] == [1, 1, 1]
    assert shown.count("another line") == 1


def test_the_address_is_shown_when_the_terminal_goes_on_after_the_start(tmp_path: Path) -> None:
    """Nothing else is printed until a process ends, perhaps for weeks."""
    (tmp_path / "c.yaml").write_text(f"model: {{path: m}}\nprocess: {{run_dir: {tmp_path}/r}}\n")
    with started(SUPERVISOR, str(tmp_path / "c.yaml")) as start:
        start.stop_output()
        start.tell("started")
        start.tell("a turn")
        assert not start.shown()
        start.resume_output()
        start.tell("a turn")
        address = "m answers at http://127.0.0.1:1/v1"
        assert start.shown(address).count(address) == 1


def test_a_supervisor_lets_the_rest_be_shown_between_two_checks(directory: Path) -> None:
    supervisor = Supervisor(load_cluster(directory / "c.yaml"), [])
    supervisor.supervise([])
    turns: list[int] = []

    def meanwhile() -> None:
        turns.append(len(turns))
        if len(turns) == 3:
            supervisor.request_stop()

    supervisor.watch(lambda text: None, meanwhile)
    supervisor.stop()
    assert turns == [0, 1, 2]
