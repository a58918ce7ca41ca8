"""What finds a cluster whose file was broken after the start, by its run directory."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner, Result

from common.config import load_cluster
from common.config.admin_listener import admin_listeners
from common.config.run_directory import run_directory
from common.process_entry import entry
from deploy import cli, found_cluster, launched, top_cli
from deploy.planning.routers import Routers
from deploy.process_table import ProcessRecord, Table, write_table
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
RUNNER = CliRunner()
UNKNOWN_KEY = "router: {prot: 1}\n"
NO_YAML = "router: {port: 1\n"


def run(*arguments: object) -> Result:
    return RUNNER.invoke(cli.app, [str(each) for each in arguments])


def said(result: Result) -> str:
    return " ".join(result.stderr.split())


class Started:
    """A cluster whose supervisor is a child of this test."""

    def __init__(self, file: Path, overrides: list[str]) -> None:
        self.file = file
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        resolved = load_cluster(file, overrides)
        self.run_dir = run_directory(resolved)
        self.admin_socket = admin_listeners(resolved).socket
        own = entry(self.child.pid)
        router = ProcessRecord(pid=own.pid, started=own.started, state="up")
        table = Table(
            supervisor=own,
            cluster=str(file),
            url="http://127.0.0.1:9",
            state="ready",
            processes={"router": router},
            admin_socket=str(self.admin_socket),
        )
        write_table(self.run_dir, table)

    def add(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)


Start = Callable[..., Started]


@pytest.fixture
def start(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a cluster of c.yaml, whose `process` section is `process`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    started: list[Started] = []

    def begin(process: str = "{run_dir: run}", overrides: list[str] | None = None) -> Started:
        file = directory / "c.yaml"
        file.write_text(f"model: {{path: m}}\nprocess: {process}\n")
        started.append(Started(file, overrides or []))
        return started[-1]

    yield begin
    for each in started:
        each.child.kill()
        each.child.wait()


@pytest.mark.parametrize(
    ("process", "overrides", "text"),
    [
        ("{run_dir: run}", [], UNKNOWN_KEY),
        ("{}", [], UNKNOWN_KEY),
        ("{}", [], NO_YAML),
        ("{run_dir: other}", ["process.run_dir=run"], NO_YAML),
    ],
)
def test_a_cluster_is_found_although_its_file_was_broken(
    start: Start, process: str, overrides: list[str], text: str
) -> None:
    started = start(process, overrides)
    started.add(text)
    options = [part for each in overrides for part in ("--set", each)]
    status = run("status", started.file, *options)
    assert status.exit_code == 1, "the router of this test answers nobody"
    assert str(started.child.pid) in status.stdout
    assert f"{started.file} is no longer valid, so none of its processes can start again: " in said(status)
    down = run("down", started.file, *options)
    assert down.exit_code == 0, said(down)
    assert said(down).endswith("stopped")
    started.child.wait(PATIENCE)


@asynccontextmanager
async def answering(socket: Path) -> AsyncIterator[None]:
    """Answer as the router of a cluster that has lost its nodes."""

    async def info(request: web.Request) -> web.Response:
        return web.json_response(
            {"ready": True, "nodes": [], "served_model_name": "tiny", "incarnation": "x"}
        )

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/server_info", info)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("admin", ["auto", "unix:own.sock"])
async def test_the_router_of_a_broken_file_is_asked(
    start: Start, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_cli, "REFRESH_SECONDS", 0.0)
    started = start(f"{{run_dir: run}}\nrouter: {{admin: '{admin}'}}")
    started.add("rooter: {}\n")
    top = typer.Typer()
    top.command()(top_cli.run)
    async with answering(started.admin_socket):
        status = await asyncio.to_thread(run, "status", started.file)
        shown = await asyncio.to_thread(RUNNER.invoke, top, [str(started.file)])
        routers = Routers(str(started.file), None)
        (sample,) = (await routers.read()).values()
    assert status.exit_code == 0, status.stdout
    assert shown.exit_code == 0, said(shown)
    assert "tiny: ready" in shown.stdout
    assert sample.info["ready"]
    for notice in (said(shown), routers.notice):
        assert f"{started.file} is no longer valid, so none of its processes can start again: " in notice


def test_a_cluster_is_found_although_its_file_was_removed(start: Start) -> None:
    started = start("{}")
    started.file.unlink()
    assert str(started.child.pid) in run("status", started.file).stdout


def test_the_run_directory_of_the_environment_comes_first(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_PROCESS_RUN_DIR", str(directory / "own"))
    started = start("{run_dir: run}")
    started.add(UNKNOWN_KEY)
    assert str(started.child.pid) in run("status", started.file).stdout
    monkeypatch.delenv("TANDEM_PROCESS_RUN_DIR")
    assert run("status", started.file).exit_code == 2


@pytest.mark.parametrize("command", ["status", "down"])
def test_an_override_that_is_not_valid_is_refused(
    start: Start, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start()
    assert run(command, started.file, "--set", "router.prot=1").exit_code == 2
    monkeypatch.setenv("TANDEM_ROUTER_PORT", "none")
    assert run(command, started.file).exit_code == 2
    assert started.child.poll() is None


def test_without_a_record_a_broken_file_is_refused(directory: Path) -> None:
    file = directory / "c.yaml"
    file.write_text("model: {path: m}\nprocess: {run_dir: run}\n" + UNKNOWN_KEY)
    for command in ("status", "down"):
        result = run(command, file)
        assert result.exit_code == 2
        assert "router.prot: unknown key" in said(result)
    assert not (directory / "run").exists()


def test_the_cluster_of_another_file_is_not_that_of_a_broken_one(start: Start, directory: Path) -> None:
    started = start()
    other = directory / "other.yaml"
    other.write_text(started.file.read_text() + UNKNOWN_KEY)
    for command in ("status", "down"):
        assert run(command, other).exit_code == 2
    assert started.child.poll() is None


def test_a_run_directory_that_others_may_write_to_is_no_record(start: Start) -> None:
    started = start()
    started.add(UNKNOWN_KEY)
    started.run_dir.chmod(0o777)
    result = run("down", started.file)
    assert result.exit_code == 2
    assert "others can write to" in said(result)
    assert started.child.poll() is None


@pytest.fixture
def unrecorded(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node of c.yaml whose run directory was removed."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", "--name", "decode-0"]
    child = subprocess.Popen([*command, "--cluster", str(directory / "c.yaml")])
    yield child
    child.kill()
    child.wait()


def test_processes_without_a_run_directory_are_named(
    unrecorded: subprocess.Popen[bytes], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_cluster, "TABLE_SECONDS", 0.0)
    for command in ("status", "down"):
        result = run(command, directory / "c.yaml")
        assert result.exit_code == 1
        assert f"of {directory}/c.yaml run: decode-0 (pid {unrecorded.pid}); end them, routers" in said(
            result
        )
    assert unrecorded.poll() is None
    elsewhere = run("status", directory / "c.yaml", "--set", "process.run_dir=other")
    assert elsewhere.exit_code == 3, "the processes have another run directory"


SUPERVISE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()", "--cluster", sys.argv[1]], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


def test_a_supervisor_without_a_run_directory_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_cluster, "TABLE_SECONDS", 0.0)
    command = [sys.executable, "-c", SUPERVISE, str(directory / "c.yaml"), "deploy.cli"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        router = supervisor.stdout.readline().strip()
        result = run("down", directory / "c.yaml")
    assert result.exit_code == 1
    named = f"router (pid {router}), the supervisor (pid {supervisor.pid}); end the supervisor, with SIGTERM"
    assert named in said(result)


def test_the_table_that_a_supervisor_writes_again_is_awaited(
    unrecorded: subprocess.Popen[bytes], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(found_cluster, "TABLE_SECONDS", PATIENCE)
    own = entry(unrecorded.pid)

    def write_again(seconds: float) -> None:
        """Do what the supervisor does meanwhile."""
        table = Table(supervisor=own, cluster="c", url="http://127.0.0.1:9", state="ready", processes={})
        write_table(directory / "run", table)

    monkeypatch.setattr(time, "sleep", write_again)
    result = run("status", directory / "c.yaml")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9: not ready" in result.stdout
    assert f"{directory}/run was removed while the cluster ran" in said(result)


ROUTER = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from router import __main__ as entry

async def nothing():
    print(1, flush=True)

http = SimpleNamespace(reload=lambda: None)
app = SimpleNamespace(start=nothing, finish_requests=nothing, close=nothing, http=http, generating=False)
entry.build = lambda *_: app
entry.main(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("admin", ["auto", "unix:own.sock"])
async def test_a_router_of_the_launch_scripts_is_asked_although_its_file_was_broken(
    directory: Path, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_cli, "REFRESH_SECONDS", 0.0)
    file = directory / "c.yaml"
    file.write_text(file.read_text() + f"router: {{admin: '{admin}'}}\n")
    command = [sys.executable, "-c", ROUTER, str(ROOT), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"1\n"
        socket = admin_listeners(load_cluster(file)).socket
        file.write_text(file.read_text() + "rooter: {}\n")
        top = typer.Typer()
        top.command()(top_cli.run)
        async with answering(socket):
            status = await asyncio.to_thread(run, "status", file)
            shown = await asyncio.to_thread(RUNNER.invoke, top, [str(file)])
            (sample,) = (await Routers(str(file), None).read()).values()
        down = await asyncio.to_thread(run, "down", file)
    assert status.exit_code == 0, status.stdout
    assert "tiny: ready" in shown.stdout
    assert sample.info["ready"]
    assert down.exit_code == 0, said(down)


DRAINS = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from common.launch_record import launch_record
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with launch_record(Path(sys.argv[2]), "decode-0", 600.0):
    print(1, flush=True)
    signal.sigtimedwait({signal.SIGTERM}, 600)
    time.sleep(0.5)
"""


@pytest.fixture
def launched_node(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A node of c.yaml that a launch script has started, and that drains for half a second."""
    run_dir = run_directory(load_cluster(directory / "c.yaml"))
    command = [sys.executable, "-c", DRAINS, str(ROOT), str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        yield child
        child.kill()


def test_processes_of_the_launch_scripts_end_although_their_file_was_broken(
    launched_node: subprocess.Popen[str], directory: Path
) -> None:
    file = directory / "c.yaml"
    file.write_text(file.read_text() + UNKNOWN_KEY)
    result = run("down", file)
    assert result.exit_code == 0, said(result)
    assert launched_node.wait(PATIENCE) == 0


def test_nodes_without_a_router_that_answers_are_named(
    launched_node: subprocess.Popen[str], directory: Path
) -> None:
    result = run("status", directory / "c.yaml")
    assert result.exit_code == 1
    assert f"no router answers here; decode-0 (pid {launched_node.pid}) runs" in said(result)


def test_processes_drain_as_long_as_the_file_said_when_they_were_launched(
    launched_node: subprocess.Popen[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "END_SECONDS", 0.0)
    file = directory / "c.yaml"
    file.write_text(file.read_text() + "health: {drain_timeout: 0.001}\n")
    result = run("down", file)
    assert result.exit_code == 0, said(result)
    assert launched_node.wait(PATIENCE) == 0
