"""deploy/up, down, status, config without a cluster (tests/cluster has one): exit codes, messages, the lock."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from common.config import load_cluster
from common.config.run_directory import run_directory
from common.errors import ConfigError
from deploy import cli
from deploy.process_table import Entry, Table, entry, write_table
from deploy.supervisor import LOCAL, AlreadyRunning, Supervisor, local_url
from tests.fakes.waiting import PATIENCE

RUNNER = CliRunner()


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster file, and a run directory with a path short enough for sockets."""
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="td") as path:
        (Path(path) / "c.yaml").write_text("model: {path: m}\nprocess: {run_dir: run}\n")
        yield Path(path)


def run(*arguments: str) -> Result:
    return RUNNER.invoke(cli.app, list(arguments))


def flat(result: Result) -> str:
    return result.stdout + result.stderr


@pytest.mark.parametrize("command", ["up", "down", "status", "config"])
def test_a_bad_file_is_refused_with_2(directory: Path, command: str) -> None:
    (directory / "bad.yaml").write_text("model: {path: m}\nrouter: {prot: 1}\n")
    result = run(command, str(directory / "bad.yaml"))
    assert result.exit_code == 2
    assert f"{directory}/bad.yaml: router.prot: unknown key; did you mean 'port'?" in flat(result)
    assert run(command, str(directory / "none.yaml")).exit_code == 2


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_a_bad_run_directory_is_refused_with_2(directory: Path, command: str) -> None:
    (directory / "run").write_text("a file")
    result = run(command, str(directory / "c.yaml"))
    assert result.exit_code == 2
    assert "process.run_dir" in flat(result)
    assert run("up", "--detach", str(directory / "c.yaml")).exit_code == 2


def test_messages_are_not_markup(directory: Path) -> None:
    """Paths and values may hold brackets; rich would swallow them, or fail."""
    odd = directory / "[bold]x[" / "y]"
    odd.mkdir(parents=True)
    (odd / "c.yaml").write_text("model: {path: m}\nrouter: {'[/red]': 1}\n")
    result = run("status", str(odd / "c.yaml"))
    assert result.exit_code == 2
    assert str(odd / "c.yaml") in flat(result)
    assert "[/red]" in flat(result)


def test_not_running(directory: Path) -> None:
    result = run("status", str(directory / "c.yaml"))
    assert (result.exit_code, flat(result).strip()) == (3, "not running")
    result = run("down", str(directory / "c.yaml"))
    assert (result.exit_code, flat(result).strip()) == (0, "not running")


def test_config_shows_every_value_whole_with_its_origin(directory: Path) -> None:
    """A script reads it: nothing is cut to 80 columns."""
    long = "/models/" + "x" * 150 + "[1]"
    result = run(
        "config", str(directory / "c.yaml"), "--set", f"model.path={long}", "--set", "router.port=8001"
    )
    assert result.exit_code == 0
    rows = {
        cells[1]: cells[2:4]
        for line in result.stdout.splitlines()
        if len(cells := line.replace("│", " | ").split(" | ")) > 3
    }
    values = {key.strip(): [cell.strip() for cell in cells] for key, cells in rows.items()}
    assert values["model.path"] == [long, "--set"]
    assert values["router.port"] == ["8001", "--set"]
    assert values["process.run_dir"] == ["run", "file:c.yaml"]
    assert values["kv.page_size"] == ["16", "default"]
    assert values["prefill.nodes[0].name"] == ["prefill-0", "default"]


def test_set_is_checked(directory: Path) -> None:
    result = run("config", str(directory / "c.yaml"), "--set", "router.prot=1")
    assert result.exit_code == 2
    assert "'router.port'" in flat(result)


def make_table(directory: Path, url: str, supervisor: Entry | None = None) -> Path:
    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    me = supervisor or entry(os.getpid())
    processes = {"router": me, "prefill-0": me, "decode-0": Entry(pid=1, started=1)}
    write_table(run_dir, Table(supervisor=me, cluster="c", url=url, state="ready", processes=processes))
    return run_dir


class Server:
    """Answers /server_info."""

    def __init__(self, answer: bytes) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


LOAD = {"running": 2, "queued": 1, "free_pages": 5, "cached_pages": 3, "total_pages": 9}


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_status(directory: Path, monkeypatch: pytest.MonkeyPatch, ready: bool, code: int) -> None:
    monkeypatch.setattr(cli, "ANSWER_SECONDS", PATIENCE)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for this host
    monkeypatch.delenv("no_proxy", raising=False)
    nodes = [{"name": "prefill-0", "state": "up", "load": LOAD}]
    with Server(json.dumps({"ready": ready, "nodes": nodes}).encode()) as server:
        make_table(directory, server.url)
        result = run("status", str(directory / "c.yaml"))
    assert result.exit_code == code
    assert f"{server.url}: ready" in result.stdout
    lines = {line.replace("│", " ").split()[0]: line for line in result.stdout.splitlines() if "│" in line}
    assert "8 / 9" in lines["prefill-0"]
    assert "dead" in lines["decode-0"]
    assert "up" in lines["router"]


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b""])
def test_status_of_something_else_on_the_port(directory: Path, answer: bytes) -> None:
    with Server(answer) as server:
        make_table(directory, server.url)
        assert run("status", str(directory / "c.yaml")).exit_code == 1


def test_status_of_a_router_that_does_not_answer(directory: Path) -> None:
    make_table(directory, "http://127.0.0.1:9")
    result = run("status", str(directory / "c.yaml"))
    assert result.exit_code == 1
    assert "not registered" in result.stdout


def test_the_loopback_opener_ignores_proxies() -> None:
    assert not [handler for handler in LOCAL.handlers if type(handler).__name__ == "ProxyHandler"]


def test_down_of_a_supervisor_that_was_just_leaving(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_table(directory, "http://127.0.0.1:9")

    def kill(pid: int, number: int) -> None:
        assert number == signal.SIGTERM
        raise ProcessLookupError

    monkeypatch.setattr(cli.os, "kill", kill)
    answers = iter([True, False])
    monkeypatch.setattr(Entry, "alive", property(lambda self: next(answers)))
    result = run("down", str(directory / "c.yaml"))
    assert (result.exit_code, flat(result).strip()) == (0, "stopped")


def test_detach_beside_a_running_cluster(directory: Path) -> None:
    make_table(directory, "http://127.0.0.1:9")
    result = run("up", "--detach", str(directory / "c.yaml"))
    assert result.exit_code == 1
    assert f"runs already at http://127.0.0.1:9 (pid {os.getpid()})" in flat(result)


# -- the supervisor's lock and address -------------------------------------------------------------------------


def supervisor(directory: Path, *overrides: str) -> Supervisor:
    return Supervisor(load_cluster(directory / "c.yaml", overrides), list(overrides))


def test_one_supervisor_per_cluster(directory: Path) -> None:
    first = supervisor(directory)
    with pytest.raises(AlreadyRunning, match="runs already; stop it with deploy/down"):
        supervisor(directory)
    result = run("up", str(directory / "c.yaml"))
    assert result.exit_code == 1
    os.close(first._lock)


def test_the_lock_of_a_file_that_was_removed_is_not_enough(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last supervisor removes the file as it goes. Whoever opened it just before would hold a lock on nothing."""
    lock = fcntl.flock
    opened: list[int] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not opened:
            (directory / "run" / "lock").unlink()
        opened.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr("deploy.supervisor.fcntl.flock", remove_first)
    first = supervisor(directory)
    assert len(opened) == 2
    with pytest.raises(AlreadyRunning):
        supervisor(directory)
    os.close(first._lock)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.1", "http://10.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_where_the_router_is_reached_from_here(host: str, url: str) -> None:
    assert local_url(host, 8000) == url


def test_up_has_to_know_the_port(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.port"):
        supervisor(directory, "router.port=0")
    assert run("up", str(directory / "c.yaml"), "--set", "router.port=0").exit_code == 2


def test_every_process_gets_the_file_and_the_overrides(directory: Path) -> None:
    made = supervisor(directory, "prefill.nodes=[{name: a}, {name: b}]", "router.port=8001")
    tail = ["--cluster", str((directory / "c.yaml").resolve())]
    tail += ["--set", "prefill.nodes=[{name: a}, {name: b}]", "--set", "router.port=8001"]
    assert [child.command for child in made.children] == [
        ["router", *tail],
        ["prefill_node", "--name", "a", *tail],
        ["prefill_node", "--name", "b", *tail],
        ["decode_node", "--name", "decode-0", *tail],
    ]
    os.close(made._lock)
