"""A process whose standard error nobody reads goes on, ends in time, and says how many lines were lost."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.observability.stderr_file import PIPE_BYTES, ROOM_INTERVAL, ROOM_SECONDS
from common.process import EXIT_DEFECT
from tests.cluster.harness import ENV, MODEL
from tests.fakes.waiting import PATIENCE

# More than any pipe, socket or terminal holds, in many lines.
MANY = "for n in range(400):\n        log.info('x' * 10_000, n=n)\n"
BODIES = {
    # Standard output tells when the body has come so far, and standard input when it may go on.
    "logs": f"{MANY}    print('done', flush=True)\n    sys.stdin.readline()\n    log.info('read again')\n",
    # As native code does, which knows nothing of the log.
    "writes": "for n in range(40):\n        with contextlib.suppress(BlockingIOError):\n"
    "            os.write(2, b'x' * 100_000)\n",
    "hangs": f"{MANY}    end_within(0.2)\n    time.sleep(10_000)\n",
}
# A reader that takes one page whenever the process waits. The time is that of its waits, and of one pause.
SLOW_READER = """
import os, select, sys, time
from common.observability import logs
from common.observability.logs import Log

now = 0.0

class Reader:
    def register(self, descriptor, events):
        pass

    def poll(self, milliseconds):
        global now
        now += min(milliseconds, 20) / 1000
        os.read(read, 4096)
        return [(2, select.POLLOUT)]

read, write = os.pipe()
os.set_blocking(write, False)
os.dup2(write, 2)
select.poll, time.monotonic = Reader, lambda: now
logs.configure("node", "info")
for _ in range(int(sys.argv[1])):
    Log("node").info("x" * int(sys.argv[2]))
print(now)
os.read(read, 1 << 20)
now += float(sys.argv[3])
for _ in range(int(sys.argv[1])):
    Log("node").info("x" * int(sys.argv[2]))
print(now)
"""
# deploy/up with a supervisor that only reports.
SUPERVISOR = """
import sys
from pathlib import Path
import deploy.cli

class Reporting:
    url, run_dir = "http://127.0.0.1:1", Path(sys.argv[1]).parent

    def __init__(self, *given):
        pass

    def start(self, show, report):
        pass

    def watch(self, report, meanwhile):
        for _ in range(400):
            report("x" * 10_000)

    def stop(self):
        pass

    request_stop = stop

deploy.cli.Supervisor = Reporting
deploy.cli.main(["up", sys.argv[1]])
"""


@contextmanager
def started(tmp_path: Path, program: str, stderr: int) -> Iterator[subprocess.Popen[str]]:
    """Start a program with a cluster file as its argument, and end it."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f'model: {{path: "{MODEL}"}}\nprocess: {{run_dir: "{tmp_path}/r"}}\n')
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def process_of_a_cluster(body: str) -> str:
    return (
        "import contextlib, os, sys, time\nfrom pathlib import Path\n"
        "from common.process import end_within, run_process\n"
        f"def body(resolved, reporter, log):\n    {BODIES[body]}"
        "run_process('router', Path(sys.argv[1]), None, None, body)\n"
    )


def ends() -> dict[str, tuple[int, int]]:
    """Return what a process may have as standard error: the end that is read, and the one that is written."""
    read, write = socket.socketpair()
    return {"pipe": os.pipe(), "terminal": pty.openpty(), "socket": (read.detach(), write.detach())}


@pytest.fixture(params=["pipe", "terminal", "socket"])
def unread(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    every = ends()
    yield every[request.param]
    for pair in every.values():
        for descriptor in pair:
            os.close(descriptor)


@pytest.mark.parametrize("body", ["logs", "writes"])
def test_a_reader_that_stops_holds_up_nobody(tmp_path: Path, unread: tuple[int, int], body: str) -> None:
    with started(tmp_path, process_of_a_cluster(body), unread[1]) as process:
        process.communicate("\n", timeout=PATIENCE)
        assert process.returncode == 0


def test_a_reader_that_stops_does_not_hold_up_the_supervisor(tmp_path: Path, unread: tuple[int, int]) -> None:
    with started(tmp_path, SUPERVISOR, unread[1]) as process:
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0


def test_others_with_the_same_pipe_or_terminal_still_wait(
    tmp_path: Path, unread: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """The shell, or another process, has the same open file and may rely on it; a socket cannot be opened again."""
    with started(tmp_path, process_of_a_cluster("writes"), unread[1]) as process:
        process.communicate(timeout=PATIENCE)
    assert os.get_blocking(unread[1]) == (request.node.callspec.params["unread"] != "socket")


def test_a_process_that_hangs_is_ended_although_nobody_reads_its_stacks(
    tmp_path: Path, unread: tuple[int, int]
) -> None:
    with started(tmp_path, process_of_a_cluster("hangs"), unread[1]) as process:
        assert process.wait(PATIENCE) == EXIT_DEFECT


def output(program: str) -> str:
    """Run a program that reads its own log, and return what it writes to standard output."""
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=ENV, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True
    ).stdout


@pytest.mark.parametrize(("lines", "size"), [(1, 1_000_000), (40, 10_000), (2000, 1000)])
@pytest.mark.parametrize("pause", [0.0, ROOM_INTERVAL])
def test_all_waits_of_an_interval_together_are_bounded(lines: int, size: int, pause: float) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SLOW_READER, str(lines), str(size), str(pause)],
        env=ENV,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    first, second = map(float, run.stdout.split())
    assert first == pytest.approx(ROOM_SECONDS)
    assert second == pytest.approx(ROOM_SECONDS + (pause + ROOM_SECONDS if pause else 0.0))


def test_lost_lines_are_counted_once_somebody_reads_again(tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, started(tmp_path, process_of_a_cluster("logs"), write) as process:
        os.close(write)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        data = os.read(read, PIPE_BYTES)  # all that it holds
        process.communicate("\n", timeout=PATIENCE)
        data += reader.read()
    # The last line before the first loss may have been cut.
    lines = [json.loads(line) for line in data.splitlines() if line.endswith(b"}")]
    kept = [line["n"] for line in lines if "n" in line]
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 400
    assert [line.get("lines") for line in lines if "were lost" in line["event"]] == [400 - len(kept)]
    assert lines[-2]["event"] == "read again"
