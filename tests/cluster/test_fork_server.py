"""Forked processes behave like started ones: log, arguments, exit codes, signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos import namespaces
from tests.cluster import fork_server
from tests.cluster.harness import ENV, ROOT
from tests.fakes.waiting import PATIENCE, until


def started(log: Path, *module: str) -> fork_server.Fork:
    with log.open("ab") as file:
        return fork_server.start(module, ROOT, ENV, file)


def test_a_module_runs_with_its_arguments_and_ends_with_its_exit_code(tmp_path: Path) -> None:
    log, marked = tmp_path / "log", tmp_path / "marked.json"
    marked.write_text("[1]")
    assert started(log, "json.tool", "--compact", str(marked)).wait(PATIENCE) == 0
    assert log.read_text() == "[1]\n"
    assert started(log, "decode_node", "--name", "decode-0").wait(PATIENCE) == 2
    assert "Missing option '--cluster'" in log.read_text()


def test_threads_and_exit_functions_of_a_fork_end_before_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert started(log, "tests.fakes.late_work").wait(PATIENCE) == 3
    assert sorted(log.read_text().splitlines()) == ["exit function", "finalizer", "thread"]


def test_a_fork_is_signalled_and_waited_for(tmp_path: Path) -> None:
    fork = started(tmp_path / "log", "http.server", "0", "--bind", "127.0.0.1")
    assert fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.01)
    fork.send_signal(signal.SIGKILL)
    assert fork.wait(PATIENCE) == -signal.SIGKILL
    fork.terminate()  # signals nobody
    assert not Path(f"/proc/{fork.pid}").exists()


def test_a_signal_for_a_fork_that_was_reaped_reaches_nobody() -> None:
    """The server reaps a fork before it reports the end, so the report may come after a signal."""
    near, server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reaped = subprocess.Popen([sys.executable, "-c", ""])
    assert reaped.wait(PATIENCE) == 0
    with server:
        server.send(str(reaped.pid).encode())
        fork = fork_server.Fork(near, ["ended"])
        fork.kill()
        assert fork.returncode is None
        server.send(b"0")
        assert fork.wait(PATIENCE) == 0


def test_a_fork_may_end_while_the_server_ends() -> None:
    """The server, which takes no more orders then, prints nothing."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.close()
    program = (
        "import signal; from tests.cluster import fork_server; "
        "fork_server.main(); signal.raise_signal(signal.SIGCHLD)"
    )
    command = [sys.executable, "-c", program, str(far.fileno())]
    with far:
        server = subprocess.run(
            command, cwd=ROOT, env=ENV, pass_fds=[far.fileno()], stderr=subprocess.PIPE, timeout=PATIENCE
        )
    assert server.returncode == 0
    assert server.stderr == b""


def test_a_fork_does_not_ignore_a_hangup(tmp_path: Path) -> None:
    """Unlike a test process under nohup: the router reloads its files on SIGHUP only if it is not ignored."""
    fork = started(tmp_path / "log", "http.server", "0", "--bind", "127.0.0.1")

    def after_a_hangup() -> int | None:
        fork.send_signal(signal.SIGHUP)
        return fork.poll()

    try:
        assert until(after_a_hangup) == -signal.SIGHUP
    finally:
        fork.kill()


def test_a_fork_has_the_descriptors_that_it_is_given_under_their_numbers(tmp_path: Path) -> None:
    """Among them are numbers that the server's own descriptors have."""
    content, written = os.memfd_create("content"), os.memfd_create("written")
    os.write(content, b"[1]")
    given = [written, content, *(os.dup(content) for _ in range(12))]
    paths = [f"/proc/self/fd/{each}" for each in (given[-1], written)]
    with (tmp_path / "log").open("ab") as log:
        fork = fork_server.start(("json.tool", "--compact", *paths), ROOT, ENV, log, descriptors=given)
    for each in given[1:]:
        os.close(each)
    assert fork.wait(PATIENCE) == 0
    os.lseek(written, 0, os.SEEK_SET)
    assert os.read(written, 100) == b"[1]\n"
    os.close(written)


def test_threads_may_wait_for_one_fork(tmp_path: Path) -> None:
    fork = started(tmp_path / "log", "http.server", "0", "--bind", "127.0.0.1")
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(fork.wait, PATIENCE) for _ in range(3)]
        fork.kill()
        assert [each.result() for each in waiting] == [-signal.SIGKILL] * 3


def test_a_fork_runs_in_a_network_namespace(tmp_path: Path) -> None:
    if reason := namespaces.missing():
        pytest.skip(reason)
    namespace = namespaces.Namespace("fork")
    namespace.create()
    try:
        with (tmp_path / "log").open("ab") as log:
            module = ("http.server", "0", "--bind", "127.0.0.1")
            fork = fork_server.start(module, ROOT, ENV, log, namespace.path)
        there = f"/proc/{fork.pid}/ns/net"
        until(lambda: os.path.samefile(there, str(namespace.path)))
        fork.kill()
        fork.wait(PATIENCE)
    finally:
        namespace.delete()
