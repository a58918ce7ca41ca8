"""deploy/up, down, status, config without a cluster (tests/cluster has one): exit codes, messages, the lock."""

from __future__ import annotations

import errno
import fcntl
import http.server
import io
import json
import os
import re
import shlex
import signal
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from common.config import load_cluster
from common.config.admin_listener import admin_listeners
from common.config.run_directory import run_directory
from common.errors import ConfigError
from common.process_entry import Entry, entry
from deploy import cli, router_states
from deploy.children import Child
from deploy.process_table import ProcessRecord, Table, write_table
from deploy.supervisor import AlreadyRunning, Supervisor, local_url
from tests.fakes.descriptors import open_descriptors
from tests.fakes.disks import FullDisk, small_disk
from tests.fakes.waiting import PATIENCE

__all__ = ["small_disk"]

RUNNER = CliRunner()


def run(*arguments: str) -> Result:
    return RUNNER.invoke(cli.app, list(arguments))


def flat(result: Result) -> str:
    return result.stdout + result.stderr


@pytest.mark.parametrize("command", ["up", "down", "status", "config"])
def test_a_bad_file_is_refused_with_2(directory: Path, command: str) -> None:
    (directory / "bad.yaml").write_text("model: {path: m}\nrouter: {prot: 1}\n")
    result = run(command, str(directory / "bad.yaml"))
    assert result.exit_code == 2
    assert f"{directory}/bad.yaml: router.prot: unknown key; did you mean 'router.port'?" in flat(result)
    missing = run(command, str(directory / "none.yaml"))
    assert missing.exit_code == 2
    assert flat(missing).replace("\n", "").count("none.yaml") == 1, "one mention of the file is enough"


def test_a_target_that_is_part_of_another_word_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    Path("port").write_text("model: {path: m}\nrouter: {prot: 1}\n")
    assert flat(run("config", "port")).startswith("port: router.prot: unknown key")


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_a_bad_run_directory_is_refused_with_2(directory: Path, command: str) -> None:
    (directory / "run").write_text("a file")
    result = run(command, str(directory / "c.yaml"))
    assert result.exit_code == 2
    assert "process.run_dir" in flat(result)
    assert run("up", "--detach", str(directory / "c.yaml")).exit_code == 2


def test_messages_are_not_markup(directory: Path) -> None:
    """Paths and values may contain brackets, which rich would swallow or reject."""
    odd = directory / "[bold]x[" / "y]"
    odd.mkdir(parents=True)
    (odd / "c.yaml").write_text("model: {path: m}\nrouter: {'[/red]': 1}\n")
    result = run("status", str(odd / "c.yaml"))
    assert result.exit_code == 2
    assert str(odd / "c.yaml") in flat(result)
    assert "[/red]" in flat(result)


def test_a_cluster_that_does_not_run_is_reported(directory: Path) -> None:
    cluster = str(directory / "c.yaml")
    result = run("status", cluster)
    assert (result.exit_code, flat(result).strip()) == (3, f"not running; deploy/up {cluster} starts it")
    result = run("down", cluster)
    assert (result.exit_code, flat(result).strip()) == (0, "not running")


def test_a_command_that_is_advised_has_the_options_of_the_one_that_advises_it(directory: Path) -> None:
    cluster = str(directory / "c.yaml")
    options = "--set process.run_dir=other --set 'model.served_name=a b' --set router.port=8002"
    result = run("status", cluster, *shlex.split(options.replace("--set router.port=", "--port ")))
    assert flat(result).strip() == f"not running; deploy/up {cluster} {options} starts it"


def test_a_url_names_no_cluster(directory: Path) -> None:
    result = run("status", "http://127.0.0.1:8000")
    assert (result.exit_code, "deploy/top shows a server by its URL" in flat(result)) == (2, True)


def test_config_shows_every_value_whole_with_its_origin(directory: Path) -> None:
    """A script reads it, so nothing is cut to 80 columns."""
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


@pytest.mark.parametrize("command", ["up", "down", "status", "config"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_speaks_of_the_script(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, flag])
    assert ended.value.code == 0
    assert f"Usage: deploy/{command} [OPTIONS]" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--gpu-memory-utilization", "--gpu-memory-utilization=0.9"])
def test_an_option_of_another_server_is_answered(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["up", "model", option])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"deploy/up: {option}: it is an option of other servers: write prefill.memory")


def make_table(
    directory: Path, url: str, decode: ProcessRecord | None = None, problems: list[str] | None = None
) -> Path:
    """Make the table of a running supervisor; `decode` replaces decode-0, which is up by default."""
    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    me = entry(os.getpid())
    up = ProcessRecord(pid=me.pid, started=me.started, state="up")
    processes = {"router": up, "prefill-0": up, "decode-0": decode or up}
    written = Table(
        supervisor=me, cluster="c", url=url, state="ready", processes=processes, problems=problems or []
    )
    write_table(run_dir, written)
    return run_dir


class Server:
    """Answers /server_info on the admin socket of the cluster."""

    url = "http://127.0.0.1:9"

    def __init__(self, directory: Path, answer: bytes) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *arguments: Any) -> None:
                pass

        place = admin_listeners(load_cluster(directory / "c.yaml")).socket
        self._server = socketserver.UnixStreamServer(str(place), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


LOAD = {"running": 2, "queued": 1, "free_pages": 5, "cached_pages": 3, "total_pages": 9}


NODES: list[dict[str, Any]] = [
    {"name": "prefill-0", "state": "up", "load": LOAD},
    {"name": "decode-0", "state": "up"},
]
ALIVE: dict[str, Any] = {"pid": os.getpid(), "started": entry(os.getpid()).started}
CRASHED = ProcessRecord(
    pid=1,
    started=1,
    state="backing off",
    restarts=7,
    restart_at=1e12,
    ended_at=0.0,
    last_end="ended with exit code 1 (ENOMEM)",
)


def status_of(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    ready: bool = True,
    nodes: list[dict[str, Any]] = NODES,
    decode: ProcessRecord | None = None,
    problems: list[str] | None = None,
) -> Result:
    monkeypatch.setattr(router_states, "INFO_SECONDS", PATIENCE)
    with Server(directory, json.dumps({"ready": ready, "nodes": nodes}).encode()) as server:
        make_table(directory, server.url, decode, problems)
        return run("status", str(directory / "c.yaml"))


def test_status(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = status_of(directory, monkeypatch)
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first.endswith(": ready")
    lines = {line.replace("│", " ").split()[0]: line for line in rest if "│" in line}
    assert "8 / 9" in lines["prefill-0"]
    assert all("up" in lines[name] for name in ("router", "prefill-0", "decode-0"))


def test_status_while_no_request_can_be_served(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = status_of(directory, monkeypatch, ready=False)
    assert result.exit_code == 1
    assert ": not ready" in result.stdout


@pytest.mark.parametrize(
    ("nodes", "decode", "shown"),
    [
        (NODES, CRASHED, "down, restarts in"),
        (NODES, ProcessRecord(pid=1, started=1, state="up"), "dead"),
        (NODES[:1], ProcessRecord(**ALIVE, state="starting", restarts=1), "starting"),
        (NODES[:1], ProcessRecord(**ALIVE, state="up"), "not registered"),
        ([NODES[0], {"name": "decode-0", "state": "draining"}], None, "draining"),
    ],
)
def test_status_of_a_degraded_cluster_has_its_exit_code(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: list[dict[str, Any]],
    decode: ProcessRecord | None,
    shown: str,
) -> None:
    """Another node of the role answers requests; a script learns of the missing one from the exit code."""
    result = status_of(directory, monkeypatch, nodes=nodes, decode=decode)
    assert result.exit_code == 4
    first, *rest = result.stdout.splitlines()
    assert first.endswith(": degraded")
    assert shown in next(line for line in rest if "decode-0" in line)


def test_status_says_why_a_process_ended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = status_of(directory, monkeypatch, decode=CRASHED)
    assert "\ndecode-0 ended with exit code 1 (ENOMEM), " in result.stdout
    assert result.stdout.endswith(" s ago\n")
    assert "7" in next(line for line in result.stdout.splitlines() if "│ decode-0" in line)


def test_status_shows_what_the_supervisor_cannot_do(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = status_of(directory, monkeypatch, problems=["the disk of [/run/x] is full"])
    assert result.exit_code == 4
    assert "problem: the disk of [/run/x] is full" in result.stdout.splitlines()


@pytest.mark.parametrize("known", [[], ["/x is read-only"]])
def test_status_sees_the_disk_itself(
    directory: Path, monkeypatch: pytest.MonkeyPatch, known: list[str]
) -> None:
    """On a disk that has become read-only the table is outdated."""
    monkeypatch.setattr(cli, "disk_problem", lambda run_dir: "/x is read-only")
    result = status_of(directory, monkeypatch, problems=["another", *known])
    assert result.exit_code == 4
    assert result.stdout.splitlines()[-2:] == ["problem: another", "problem: /x is read-only"]


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"", b'{"a": "\xff"}'])
def test_status_of_something_else_on_the_socket(directory: Path, answer: bytes) -> None:
    with Server(directory, answer) as server:
        make_table(directory, server.url)
        result = run("status", str(directory / "c.yaml"))
    assert result.exit_code == 1
    assert "does not answer" in result.stdout


def test_status_of_a_router_that_does_not_answer(directory: Path) -> None:
    make_table(directory, "http://127.0.0.1:9")
    result = run("status", str(directory / "c.yaml"))
    assert result.exit_code == 1
    assert "does not answer" in result.stdout


@pytest.mark.parametrize(
    ("ready", "state", "code", "shown"),
    [(True, "up", 0, "ready; "), (True, "draining", 4, "degraded; "), (False, "up", 1, "not ready; ")],
)
def test_status_of_a_cluster_from_the_launch_scripts(
    directory: Path, monkeypatch: pytest.MonkeyPatch, ready: bool, state: str, code: int, shown: str
) -> None:
    """No supervisor wrote a table, but the router answers on its admin socket."""
    monkeypatch.setattr(router_states, "INFO_SECONDS", PATIENCE)
    nodes = [{**NODES[0], "state": state, "pid": 7, "host": "[there]"}]
    with Server(directory, json.dumps({"ready": ready, "nodes": nodes}).encode()):
        result = run("status", str(directory / "c.yaml"))
        down = run("down", str(directory / "c.yaml"))
    assert result.exit_code == code
    assert result.stdout.startswith(f"{shown}started by the launch scripts")
    assert "8 / 9" in next(line for line in result.stdout.splitlines() if "prefill-0" in line)
    assert down.exit_code == 1
    assert "where it was started: the router, prefill-0 (pid 7 on [there])" in flat(down)


def test_down_of_a_supervisor_that_was_just_leaving(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may belong to another process by now, which gets no signal."""
    make_table(directory, "http://127.0.0.1:9")

    def send(target: int, number: int) -> None:
        raise AssertionError(f"signal {number} was sent")

    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    monkeypatch.setattr(os, "kill", send)
    answers = iter([True, False, False])
    monkeypatch.setattr(Entry, "alive", property(lambda self: next(answers)))
    result = run("down", str(directory / "c.yaml"))
    assert (result.exit_code, flat(result).strip()) == (0, "stopped")


def test_detach_beside_a_running_cluster(directory: Path) -> None:
    make_table(directory, "http://127.0.0.1:9")
    result = run("up", "--detach", str(directory / "c.yaml"))
    assert result.exit_code == 1
    assert f"already running at http://127.0.0.1:9 (pid {os.getpid()})" in flat(result)
    assert f"deploy/down {directory / 'c.yaml'}" in flat(result)


# -- a run directory that is not writable ------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_a_read_only_run_directory_is_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **_: path != run_dir and access(path, mode))
    result = run(*arguments, str(directory / "c.yaml"))
    assert result.exit_code == 2
    (line,) = flat(result).splitlines()
    assert f"process.run_dir: cannot write to {run_dir}" in line
    assert "set process.run_dir to another directory" in line
    assert run("status", str(directory / "c.yaml")).exit_code == 3  # reading needs no write permission


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_a_real_read_only_run_directory(
    directory: Path, small_disk: FullDisk, arguments: tuple[str, ...]
) -> None:
    small_disk.make_read_only()
    result = run(*arguments, str(directory / "c.yaml"), "--set", f"process.run_dir={small_disk.path}")
    assert result.exit_code == 2
    (line,) = flat(result).splitlines()
    assert f"cannot write to {small_disk.path}" in line


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_a_real_full_disk(directory: Path, small_disk: FullDisk, arguments: tuple[str, ...]) -> None:
    """The log of a detached supervisor, which would have its reason, is on this disk, too."""
    small_disk.fill()
    result = run(*arguments, str(directory / "c.yaml"), "--set", f"process.run_dir={small_disk.path}")
    assert result.exit_code == 2
    (line,) = flat(result).splitlines()
    assert f"process.run_dir: cannot write to {small_disk.path}: " in line
    assert "No space left on device" in line


@pytest.mark.parametrize("call", ["mkdir", "lock", "write_bytes"])
def test_a_disk_that_is_full_at_the_start_is_one_sentence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The message is one sentence whichever fails first: the log directory, the lock, or the table."""

    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    owner, name, failing = {
        "mkdir": (Path, "mkdir", "logs"),
        "lock": (os, "open", "lock"),
        "write_bytes": (Path, "write_bytes", ""),
    }[call]
    real = getattr(owner, name)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if failing in ("", Path(path).name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **options)

    monkeypatch.setattr(owner, name, full)
    result = run("up", str(directory / "c.yaml"))
    assert result.exit_code == 2
    (line,) = flat(result).splitlines()
    assert f"process.run_dir: cannot write to {run_dir}: " in line
    assert "No space left on device" in line
    assert not list(run_dir.glob("lock"))


def test_a_terminal_that_is_closed_during_the_start_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        written = 0

        def write(self, text: str) -> int:
            self.written += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    closed = Closed()
    monkeypatch.setattr(cli, "console", Console(file=closed, force_terminal=True))
    with cli.StartView() as view:
        for _ in range(2):
            view.show([Child("router", ["router"], tmp_path / "log")])
    assert closed.written > 0


# -- the supervisor's lock and address -------------------------------------------------------------------------


def supervisor(directory: Path, *overrides: str) -> Supervisor:
    return Supervisor(load_cluster(directory / "c.yaml", overrides), list(overrides))


def test_one_supervisor_per_cluster(directory: Path) -> None:
    first = supervisor(directory)
    with pytest.raises(AlreadyRunning, match=f"stop it with deploy/down {directory / 'c.yaml'}"):
        supervisor(directory)
    result = run("up", str(directory / "c.yaml"))
    assert result.exit_code == 1
    first.stop()


@pytest.mark.parametrize("key", ["process.run_dir", " process.run_dir "])
def test_how_to_stop_a_running_cluster_names_the_directory_that_it_was_given(
    directory: Path, key: str
) -> None:
    """Without it `deploy/down` would find the cluster that has the directory of the file, or none."""
    given = f"{key}={directory}/other"
    first = supervisor(directory, given)
    line = shlex.join(["deploy/down", str(directory / "c.yaml"), "--set", given])
    with pytest.raises(AlreadyRunning, match=f"stop it with {re.escape(line)}$"):
        supervisor(directory, "router.port=8002", given)
    first.stop()


def test_detach_beside_a_cluster_with_a_directory_of_its_own(directory: Path) -> None:
    given = f"process.run_dir={make_table(directory, 'http://127.0.0.1:9')}"
    result = run("up", "--detach", str(directory / "c.yaml"), "--set", given)
    assert f"stop it with deploy/down {directory / 'c.yaml'} --set {given}" in flat(result)


def test_a_file_system_without_locks_is_no_running_cluster(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("deploy.supervisor.fcntl.flock", refuse)
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"process\.run_dir: .*No locks available"):
        supervisor(directory)
    assert open_descriptors() == before


def test_a_running_cluster_whose_lock_was_removed_is_not_disturbed(directory: Path) -> None:
    """A new supervisor would end its processes as if a killed one had left them."""
    run_dir = make_table(directory, "http://127.0.0.1:9")
    before = open_descriptors()
    with pytest.raises(AlreadyRunning, match=rf"at http://127.0.0.1:9 \(pid {os.getpid()}\)"):
        supervisor(directory)
    assert open_descriptors() == before
    assert (run_dir / "cluster.json").exists()


def test_the_lock_of_a_file_that_was_removed_is_not_enough(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exiting supervisor removes the file, so a process that opened it just before would hold a useless lock."""
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
    first.stop()


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
    assert local_url(host, 8000, "http") == url
    assert local_url(host, 8000, "https") == url.replace("http:", "https:")


def test_up_has_to_know_the_port(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.port"):
        supervisor(directory, "router.port=0")
    assert run("up", str(directory / "c.yaml"), "--set", "router.port=0").exit_code == 2


def test_every_process_gets_the_file_and_the_overrides(directory: Path) -> None:
    made = supervisor(directory, "prefill.nodes=[{name: a}, {name: b}]", "router.port=8001")
    tail = ["--cluster", str((directory / "c.yaml").resolve())]
    tail += ["--set", "prefill.nodes=[{name: a}, {name: b}]", "--set", "router.port=8001"]
    assert [child.command for child in made.children] == [
        ["router", "--process", "0", *tail],
        ["prefill_node", "--name", "a", *tail],
        ["prefill_node", "--name", "b", *tail],
        ["decode_node", "--name", "decode-0", *tail],
    ]
    made.stop()


@pytest.mark.parametrize("command", ["down", "status", "config"])
def test_the_port_is_taken_as_up_takes_it(directory: Path, command: str) -> None:
    result = run(command, str(directory / "c.yaml"), "--port", "8115")
    assert result.exit_code == {"down": 0, "status": 3, "config": 0}[command]
    assert "8115" in result.stdout if command == "config" else "not running" in flat(result)
