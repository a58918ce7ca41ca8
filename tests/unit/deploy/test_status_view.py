"""`deploy/status` shows the ranks of nodes that have several, and which of several routers serve."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from common.config import load_cluster
from common.config.run_directory import own_socket, run_directory
from common.process_entry import entry
from deploy import router_states as states_module
from deploy.process_table import ProcessRecord, Table
from deploy.router_states import router_states, server_info, sockets_of
from deploy.status_view import DEGRADED, NOT_READY, UP, show_launched, show_status
from tests.fakes.waiting import PATIENCE

LOAD = {"running": 3, "queued": 0, "free_pages": 5, "cached_pages": 1, "total_pages": 9}
RANKS = [
    {"device": "cuda:0", "memory_bytes": 3 << 30, "plans": 7, "behind": 0},
    {"device": "cuda:1", "memory_bytes": 2 << 30, "plans": 5, "behind": 2},
]
NODES = [
    {"name": "prefill-0", "state": "up", "load": LOAD, "host": "a", "pid": 7, "ranks": RANKS[:1]},
    {"name": "decode-0", "state": "up", "load": LOAD, "host": "a", "pid": 8, "ranks": RANKS},
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for servers of this process, which may be kept from running, longer than for those of a cluster."""
    for name in ("INFO_SECONDS", "READY_SECONDS"):
        monkeypatch.setattr(states_module, name, PATIENCE)


def console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=200), text


def rank_rows(text: str) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in text.splitlines() if "GiB" in line]


SHOWN = ["decode-0/0 cuda:0, 3.0 GiB", "decode-0/1 cuda:1, 2.0 GiB, 2 plans behind"]


def test_ranks_of_a_launched_cluster() -> None:
    out, text = console()
    assert show_launched({"ready": True, "nodes": NODES}, out) == UP
    assert rank_rows(text.getvalue()) == SHOWN


def test_ranks_of_a_cluster_with_a_supervisor() -> None:
    own = entry(os.getpid())
    record = ProcessRecord(pid=own.pid, started=own.started, state="up")
    processes = {name: record for name in ("router", "prefill-0", "decode-0")}
    table = Table(supervisor=own, cluster="c", url="http://h", state="ready", processes=processes)
    out, text = console()
    assert show_status(table, None, {"ready": True, "nodes": NODES}, {}, out) == UP
    assert rank_rows(text.getvalue()) == SHOWN


@pytest.mark.parametrize("state", ["not ready", "does not answer"])
def test_a_router_that_does_not_serve_is_shown_although_another_one_answers(state: str) -> None:
    own = entry(os.getpid())
    record = ProcessRecord(pid=own.pid, started=own.started, state="up")
    processes = {name: record for name in ("router", "router.1", "prefill-0", "decode-0")}
    table = Table(supervisor=own, cluster="c", url="http://h", state="ready", processes=processes)
    info = {"ready": True, "nodes": NODES}
    out, text = console()
    assert show_status(table, None, info, {"router": state, "router.1": "up"}, out) == DEGRADED
    assert text.getvalue().count(state) == 1
    assert show_status(table, None, info, {"router": "up", "router.1": "up"}, out) == UP
    out, text = console()
    assert show_status(table, None, None, {"router": state, "router.1": "up"}, out) == NOT_READY
    shown = [line.replace("│", " ").split() for line in text.getvalue().splitlines() if "router" in line]
    assert [row[2:-1] for row in shown] == [state.split(), ["up"]], (
        "the admin socket belongs to the other one"
    )


async def test_a_router_of_a_later_host_is_asked(tmp_path: Path) -> None:
    file, hosts = tmp_path / "my.yaml", "[tcp://a:9000, tcp://b:9000]"
    routers = f"router: {{processes: 2, control_address: {hosts}}}"
    file.write_text(f"model: {{path: m}}\n{routers}\nprocess: {{run_dir: {tmp_path}/run}}\n")
    resolved, app = load_cluster(file, environ={}), web.Application()

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    app.router.add_get("/server_info", info)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(own_socket(resolved, 3))).start()
    assert await asyncio.to_thread(server_info, sockets_of(resolved)) == {"ready": True}
    await runner.cleanup()


async def test_each_of_several_routers_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"model: {{path: m}}\nrouter: {{processes: 3}}\nprocess: {{run_dir: {tmp_path}/run}}\n")
    resolved, runners = load_cluster(file, environ={}), []
    for index, status in enumerate((200, 503)):

        async def ready(request: web.Request, status: int = status) -> web.Response:
            return web.Response(status=status)

        async def info(request: web.Request, index: int = index) -> web.Response:
            return web.json_response({"ready": True, "index": index})

        app = web.Application()
        app.router.add_get("/ready", ready)
        app.router.add_get("/server_info", info)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.UnixSite(runners[-1], str(own_socket(resolved, index))).start()
    asked = ["router", "router.1", "router.2", "decode-0"]
    states = await asyncio.to_thread(router_states, run_directory(resolved), asked)
    assert states == {"router": "up", "router.1": "not ready", "router.2": "does not answer"}
    assert router_states(run_directory(resolved), ["router", "decode-0"]) == {}
    # Nothing listens at the admin socket.
    assert await asyncio.to_thread(server_info, sockets_of(resolved)) == {"ready": True, "index": 0}
    await runners[0].cleanup()
    assert await asyncio.to_thread(server_info, sockets_of(resolved)) == {"ready": True, "index": 1}
    for runner in runners:
        await runner.cleanup()
