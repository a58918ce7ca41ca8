"""Machine-readable logs, start-up progress, exit codes and signals of a process."""

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
from common.errors import ConfigError, ModelError, NodeRefused, RankFailed
from common.observability import startup
from common.observability.logs import Log
from common.observability.startup import Progress, StartupReporter
from common.process import EXIT_REFUSED, run_process
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
LOCAL = ROOT / "deploy" / "clusters" / "local.yaml"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, because logging is configured once per process."""
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


def test_a_full_disk_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    """Nothing is raised or buffered, and the number of lost lines is logged once there is room again."""
    done = run(
        "import os, sys\n"
        f"file = os.open({str(tmp_path / 'log')!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "logs.configure('n', 'info')\n"
        "log = Log('n')\n"
        "log.info('lost')\n"
        "log.info('lost too')\n"
        "os.dup2(file, 2)\n"
        "log.info('written')\n"
        "log.info('and again')\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "log.info('lost at the end')\n"
    )
    assert done.returncode == 0  # 120 means that the interpreter could not flush stderr at exit
    told, *rest = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (told["level"], told["lines"]) == ("warning", 2)
    assert "lost" in told["event"]
    assert [line["event"] for line in rest] == ["written", "and again"]


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path) -> None:
    """A disk fills up in the middle of a line; RLIMIT_FSIZE cuts a write in the same way."""
    log = tmp_path / "log"
    done = run(
        "import os, resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"os.dup2(os.open({str(log)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)\n"
        "logs.configure('n', 'info')\n"
        "Log('n').info('first')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(2).st_size + 10, resource.RLIM_INFINITY))\n"
        "Log('n').info('second')\n"
        "Log('n').info('third')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "Log('n').info('fourth')\n"
    )
    assert done.returncode == 0, done.stderr
    first, cut, told, fourth = log.read_text().splitlines()
    assert len(cut) == 10
    assert [json.loads(line)["event"] for line in (first, fourth)] == ["first", "fourth"]
    assert json.loads(told)["lines"] == 2


def test_names_of_files_that_are_not_utf_8_are_logged_with_escapes() -> None:
    done = run("logs.configure('n', 'info')\nLog('n').info('cannot read', path='/m/\\udcff', odd={1})\n")
    (line,) = [json.loads(each) for each in done.stderr.splitlines()]
    assert (line["event"], line["path"]) == ("cannot read", "/m/\udcff")


def test_a_field_that_cannot_be_shown_is_not_the_callers_problem() -> None:
    done = run(
        "class Odd:\n    def __str__(self):\n        raise ValueError('odd')\n"
        "logs.configure('n', 'info')\nLog('n').info('event', odd=Odd())\nprint('still here')\n"
    )
    assert (done.returncode, done.stdout) == (0, "still here\n")


# -- rotation --------------------------------------------------------------------------------------------------

LOG_TO_A_FILE = (
    "import os, sys\n"
    "os.chdir(sys.argv[1])\n"
    "log_file = os.open('n.log', os.O_CREAT | os.O_APPEND | os.O_WRONLY)\n"
    "os.dup2(log_file, 1)\n"
    "os.dup2(log_file, 2)\n"
    "os.close(log_file)\n"
    "logs.configure('n', 'info', max_bytes=1000)\n"
    "log = Log('n')\n"
)


def run_in(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    return run(f"import sys\nsys.argv.append({str(directory)!r})\n" + LOG_TO_A_FILE + code)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_text().splitlines() if line.startswith("{")]


def test_a_log_rotates_and_one_old_file_is_kept(tmp_path: Path) -> None:
    done = run_in(
        tmp_path,
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for number in range(100):\n    log.info('event', number=number)\n"
        "assert len(os.listdir('/proc/self/fd')) == before\n"
        "print('printed')\n"
        "sys.stdout.flush()\n"
        "os.write(2, b'a crash of native code\\n')\n",
    )
    assert done.returncode == 0, (tmp_path / "n.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.log", "n.log.1"]
    kept = numbers(tmp_path / "n.log.1") + numbers(tmp_path / "n.log")
    assert kept == list(range(kept[0], 100))
    assert 500 < (tmp_path / "n.log.1").stat().st_size <= 1000
    assert (tmp_path / "n.log").read_text().endswith("printed\na crash of native code\n")


def test_a_log_that_cannot_be_rotated_is_emptied(tmp_path: Path) -> None:
    """If no new file can be created (a directory in its place simulates a disk without inodes), size stays bounded."""
    (tmp_path / "n.log.1" / "in the way").mkdir(parents=True)
    done = run_in(tmp_path, "for number in range(100):\n    log.info('event', number=number)\n")
    assert done.returncode == 0
    assert (tmp_path / "n.log").stat().st_size <= 1000
    assert numbers(tmp_path / "n.log")[-1] == 99


@pytest.mark.parametrize(("only", "rotated"), [("n.log", True), ("other.log", False), ("none.log", False)])
def test_a_file_of_somebody_else_is_not_rotated(tmp_path: Path, only: str, rotated: bool) -> None:
    (tmp_path / "other.log").touch()
    done = run_in(
        tmp_path,
        "from pathlib import Path\nfrom common.observability.stderr_file import StderrFile\n"
        f"StderrFile(10, Path({only!r})).make_room(11)\n",
    )
    assert done.returncode == 0
    assert (tmp_path / "n.log.1").exists() == rotated


def test_a_log_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    done = run_in(
        tmp_path,
        "log.info('event', number=0)\n"
        "os.rename('n.log', 'moved')\n"
        "for number in range(1, 12):\n    log.info('event', number=number)\n",
    )
    assert done.returncode == 0
    assert not (tmp_path / "n.log.1").exists()
    assert numbers(tmp_path / "moved") + numbers(tmp_path / "n.log") == list(range(12))


def test_a_line_that_the_last_process_left_unfinished_is_ended(tmp_path: Path) -> None:
    (tmp_path / "n.log").write_text('{"event":"cut')
    done = run_in(tmp_path, "log.info('first')\nlog.info('second')\n")
    assert done.returncode == 0
    cut, *rest = (tmp_path / "n.log").read_text().splitlines()
    assert cut == '{"event":"cut'
    assert [json.loads(line)["event"] for line in rest] == ["first", "second"]


def test_a_pipe_is_not_rotated() -> None:
    done = run(
        "logs.configure('n', 'info', max_bytes=10)\nfor n in range(3):\n    Log('n').info('event', n=n)\n"
    )
    assert [json.loads(line)["n"] for line in done.stderr.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(("supervised", "rotated"), [(True, True), (False, False)])
def test_only_the_supervisors_log_is_rotated(tmp_path: Path, supervised: bool, rotated: bool) -> None:
    """A process that a person started with `2> file` leaves that file unchanged."""
    done = run_in(
        tmp_path,
        "from pathlib import Path\nfrom common.process import run_process\n"
        "def body(resolved, reporter, log):\n"
        "    for n in range(12):\n        log.info('x' * 100_000)\n"
        "read_end, write_end = os.pipe()\n"
        f"run_process('n', Path({str(LOCAL)!r}), ['process.log_max_mib=1'], "
        f"write_end if {supervised} else None, body)\n",
    )
    assert done.returncode == 0
    assert (tmp_path / "n.log.1").exists() == rotated


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
        reporter.report("loading", 1, 100)  # too soon after the last one: dropped
        reporter.report("loading", 100, 100)  # the end is always reported
        reporter.report("ready")
    assert lines(pipe[0]) == [
        Progress(phase="importing"),
        Progress(phase="loading", done=100, total=100),
        Progress(phase="ready"),
    ]
    assert os.read(pipe[0], 1) == b""  # closed
    os.close(pipe[0])


def test_a_reader_that_stops_blocks_no_writer(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if loading weights takes hours, all reports fit into the pipe, the last one included."""
    clock = Clock()
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=clock))
    with StartupReporter(pipe[1], Log("n")) as reporter:
        os.set_blocking(pipe[1], False)  # a full pipe would be closed, and its end lost
        for done in range(20_000):
            reporter.report("loading", done, 20_000)
            clock.now += 1
        reporter.report("ready")
    said = lines(pipe[0])
    assert [line.phase for line in said] == ["loading"] * 100 + ["ready"]
    assert len({100 * line.done // line.total for line in said[:-1]}) == 100
    os.close(pipe[0])


def test_progress_without_a_reader_is_dropped(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with StartupReporter(pipe[1], Log("n")) as reporter:
        reporter.report("importing")
        reporter.report("ready")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(pipe[1])  # it was closed although the write failed


def test_a_failure_is_reported(pipe: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no such"), StartupReporter(pipe[1], Log("n")):
        raise ValueError("no such weight")
    assert lines(pipe[0]) == [Progress(phase="failed", message="no such weight")]
    os.close(pipe[0])


def test_a_failure_that_names_a_file_is_reported_even_if_the_name_is_not_utf_8(pipe: tuple[int, int]) -> None:
    with pytest.raises(ModelError), StartupReporter(pipe[1], Log("n")):
        raise ModelError("cannot read /m/\udcff")
    assert lines(pipe[0]) == [Progress(phase="failed", message="cannot read /m/\\udcff")]
    os.close(pipe[0])


def test_leaving_on_purpose_is_no_failure(pipe: tuple[int, int]) -> None:
    with pytest.raises(SystemExit), StartupReporter(pipe[1], Log("n")):
        raise SystemExit(0)
    assert os.read(pipe[0], 100) == b""
    os.close(pipe[0])


def test_without_a_descriptor_nothing_is_reported() -> None:
    with StartupReporter(None, Log("n")) as reporter:
        reporter.report("ready")


# -- processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError("router.port", "taken"), ModelError("no weights")])
def test_errors_that_a_restart_cannot_fix_have_their_exit_code(
    error: Exception, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_process("router", LOCAL, None, pipe[1], body)
    assert caught.value.code == EXIT_REFUSED == 2
    assert f"router: {error}" in capfd.readouterr().err
    assert lines(pipe[0]) == [Progress(phase="failed", message=str(error))]
    os.close(pipe[0])


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ConfigError("router.port", "taken"), "cannot start"),
        (NodeRefused("decode-0 is already running as process 5"), "no router takes this node: it ends"),
        (RankFailed(1, "rank 1 has ended"), "a rank of this node has failed: the node ends"),
    ],
)
def test_the_log_says_once_why_a_process_ends(
    error: Exception, event: str, pipe: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """A router may refuse a node that is ready: nothing then says that the start failed, except to its supervisor."""

    def body(resolved: Resolved, reporter: StartupReporter, log: Log) -> None:
        reporter.report("ready")
        raise error

    with pytest.raises(SystemExit):
        run_process("decode-0", LOCAL, None, pipe[1], body)
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    reasons = [line["event"] for line in logged if str(error) in line.values()]
    assert reasons == [event]
    assert lines(pipe[0])[-1] == Progress(phase="failed", message=str(error))
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
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_drain_and_then_end_a_process(
    waiting: Callable[[], subprocess.Popen[str]], first: signal.Signals, second: signal.Signals, code: int
) -> None:
    """The first signal drains; a second Ctrl-C ends the process at once."""
    with waiting() as child:
        child.send_signal(first)
        assert child.stdout is not None
        assert child.stdout.readline() == "drain\n"
        child.send_signal(second)
        assert child.wait(PATIENCE) == code
