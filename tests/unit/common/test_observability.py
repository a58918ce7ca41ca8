"""Logs that a program can read, start-up progress, exit codes and signals of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from common.config import Resolved
from common.errors import ConfigError, ModelError
from common.observability import startup
from common.observability.logs import Log
from common.observability.startup import Progress, StartupReporter
from common.process import EXIT_REFUSED, run_process
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
LOCAL = ROOT / "deploy" / "clusters" / "local.yaml"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Logging is configured once per process, so each case has one of its own."""
    head = "from common.observability import logs\nfrom common.observability.logs import Log\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


# -- logs ------------------------------------------------------------------------------------------------------


def test_one_json_object_per_line() -> None:
    done = run(
        "import logging\n"
        "logs.configure('decode-0', 'info')\n"
        "log = Log('decode-0')\n"
        "log.debug('not shown')\n"
        "log.info('a\\nb %s', request_id='q', room=2**63 - 1, nothing=None, odd={1, }, nan=float('nan'))\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed', request_id='q')\n"
        "logging.getLogger('other.library').warning('theirs %d', 7)\n"
        "logging.getLogger('other.library').info('not shown')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    first, second, third = [json.loads(line) for line in done.stderr.splitlines()]
    assert (first["event"], first["level"], first["node"]) == ("a\nb %s", "info", "decode-0")
    assert (first["request_id"], first["room"], first["nothing"], first["odd"]) == ("q", 2**63 - 1, None, [1])
    assert first["nan"] is None
    assert "ZeroDivisionError" in second["exception"]
    assert second["level"] == "error"
    assert third["event"] == "theirs 7"
    for line in (first, second, third):
        assert len(line["time"]) == len("2026-01-01T00:00:00.000Z")


def test_a_stream_that_is_gone_does_not_stop_serving() -> None:
    done = run(
        "import os\nlogs.configure('n', 'info')\nlog = Log('n')\nos.close(2)\n"
        "log.info('lost')\nlog.warning('lost')\nprint('still here')\n"
    )
    assert done.stdout == "still here\n"


# -- progress --------------------------------------------------------------------------------------------------


def lines(read_end: int) -> list[Progress]:
    data = os.read(read_end, 1 << 16)
    return [msgspec.json.decode(line, type=Progress) for line in data.splitlines()]


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def test_progress_is_json_lines(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=Clock()))
    with StartupReporter(pipe[1], Log("n")) as reporter:
        reporter.report("importing")
        reporter.report("loading", 0, 100)
        reporter.report("loading", 1, 100)  # too soon after the last: thinned out
        reporter.report("loading", 100, 100)  # the end is always said
        reporter.report("ready")
    assert lines(pipe[0]) == [
        Progress(phase="importing"),
        Progress(phase="loading", done=100, total=100),
        Progress(phase="ready"),
    ]
    assert os.read(pipe[0], 1) == b""  # closed
    os.close(pipe[0])


def test_progress_nobody_reads(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with StartupReporter(pipe[1], Log("n")) as reporter:
        reporter.report("importing")
        reporter.report("ready")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(pipe[1])  # it was closed although the write failed


def test_a_failure_is_told(pipe: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no such"), StartupReporter(pipe[1], Log("n")):
        raise ValueError("no such weight")
    assert lines(pipe[0]) == [Progress(phase="failed", message="no such weight")]
    os.close(pipe[0])


def test_leaving_on_purpose_is_no_failure(pipe: tuple[int, int]) -> None:
    with pytest.raises(SystemExit), StartupReporter(pipe[1], Log("n")):
        raise SystemExit(0)
    assert os.read(pipe[0], 100) == b""
    os.close(pipe[0])


def test_without_a_descriptor() -> None:
    with StartupReporter(None, Log("n")) as reporter:
        reporter.report("ready")


# -- processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError("router.port", "taken"), ModelError("no weights")])
def test_what_starting_again_would_not_mend(
    error: Exception, pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_process("router", LOCAL, None, pipe[1], body)
    assert caught.value.code == EXIT_REFUSED == 2
    assert f"router: {error}" in capsys.readouterr().err
    assert lines(pipe[0]) == [Progress(phase="failed", message=str(error))]
    os.close(pipe[0])


def test_a_defect_is_not_hidden() -> None:
    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_process("router", LOCAL, None, None, body)


@pytest.fixture
def waiting() -> Callable[[], subprocess.Popen[str]]:
    code = (
        "import time\nfrom common.process import on_termination\n"
        "stop = []\non_termination(lambda: (stop.append(1), print('drain', flush=True)))\n"
        "print('ready', flush=True)\n"
        "while len(stop) < 2:\n    time.sleep(0.01)\n"
    )

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    return start


@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)], ids=["SIGTERM", "SIGINT"]
)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_signals(
    waiting: Callable[[], subprocess.Popen[str]], first: signal.Signals, second: signal.Signals, code: int
) -> None:
    """The first drains; a second Ctrl-C ends the process at once."""
    with waiting() as child:
        child.send_signal(first)
        assert child.stdout is not None
        assert child.stdout.readline() == "drain\n"
        child.send_signal(second)
        assert child.wait(PATIENCE) == code
