"""Router processes of one host ask each other over real Unix sockets; a scripted process answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common.errors import Unavailable
from common.observability.logs import Log
from router.exchange import host_peers
from router.exchange.host_peers import HostPeers
from router.exchange.host_routes import HostRoutes
from router.exchange.orders import AbortOrder
from router.http.body_memory import BodyMemory
from router.http.request_body import PIECES_PER_TURN, memory_key, pieces_key
from router.process.turns import Turns
from tests.fakes.waiting import PATIENCE, eventually

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]
Serve = Callable[[str, web.Application], Coroutine[Any, Any, Path]]


class Running:
    """The requests of a process."""

    def __init__(self, prompts: dict[str, list[str]]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return sum(map(len, self.prompts.values()))

    def count(self, client: str) -> int:
        return len(self.prompts.get(client, ()))

    def abort(self, client: str, identities: tuple[str, ...]) -> int:
        kept = [each for each in self.prompts.get(client, ()) if each not in identities]
        ended = self.count(client) - len(kept)
        self.prompts[client] = kept
        return ended

    def abort_all(self) -> int:
        ended = len(self)
        self.prompts.clear()
        return ended


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(name: str, app: web.Application) -> Path:
        path = tmp_path / name
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        runners.append(runner)
        return path

    yield start
    for runner in runners:
        await runner.cleanup()


def scripted(handler: Handler) -> web.Application:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    return app


async def series_of_one(accept: str) -> tuple[bytes, str]:
    return b"# HELP requests All\n# TYPE requests counter\nrequests 5.0\n", "text/plain"


async def test_each_process_answers_for_itself(serve: Serve, tmp_path: Path) -> None:
    running = Running({"team": ["r1", "r2"], "other": ["r3"]})
    paused: list[bool] = []
    routes = HostRoutes(
        "router.1",
        series_of_one,
        {"a/b c": {"request_id": "a/b c", "client": "team"}}.get,
        lambda count, client: [{"request_id": f"{count} of {client}"}],
        running,  # type: ignore[arg-type]
        paused.append,
        lambda: 9,
        lambda: ["decode-0", "prefill-0"],
    )
    app = web.Application()
    with_bodies(app)
    routes.add_to(app)
    peers = HostPeers("router", {"router.1": await serve("one", app)}, Log("test"))
    own = b"# HELP requests All\n# TYPE requests counter\nrequests 3.0\n"
    series = (await peers.metrics(own, "*/*")).decode().splitlines()
    assert series[2:] == ['requests{router="router"} 3.0', 'requests{router="router.1"} 5.0']
    assert await peers.timeline("a/b c") == {"request_id": "a/b c", "client": "team"}
    assert await peers.timeline("unknown") is None
    assert await peers.latest(7, None) == [{"request_id": "7 of None"}]
    assert await peers.latest(7, "a&b =") == [{"request_id": "7 of a&b ="}]
    assert (await peers.active(), await peers.active("team"), await peers.active("nobody")) == (3, 2, 0)
    assert await peers.abort(AbortOrder("other", ("r1", "r2"))) == 0
    assert await peers.abort(AbortOrder("team", ("r2", "x"))) == 1
    assert running.prompts["team"] == ["r1"]
    assert await peers.abort(AbortOrder(None)) == 2
    assert (await peers.pause(True), await peers.pause(False), paused) == (9, 9, [True, False])
    assert await peers.flush() == {"decode-0", "prefill-0"}


def with_bodies(app: web.Application) -> None:
    """Give the application what reading a body needs."""
    app[memory_key] = BodyMemory()
    app[pieces_key] = Turns(PIECES_PER_TURN)


async def test_the_only_process_asks_nobody() -> None:
    peers = HostPeers("router", {}, Log("test"))
    assert await peers.metrics(b"as it is", "*/*") == b"as it is"
    assert await peers.timeline("r") is None
    assert await peers.latest(7, None) == []
    assert (await peers.active(), await peers.abort(AbortOrder(None)), await peers.pause(True)) == (0, 0, 0)
    assert await peers.flush() == set()


async def test_those_that_do_not_answer_are_left_out(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is dead, one hangs, one fails and one says too much: the answer of the last one counts."""
    monkeypatch.setattr(host_peers, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(host_peers, "MAX_BYTES", 1000)

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    async def fails(request: web.Request) -> web.Response:
        return web.Response(status=500, body=b"7")

    async def endless(request: web.Request) -> web.Response:
        return web.Response(body=b"1" * 1001)

    async def answers(request: web.Request) -> web.Response:
        return web.Response(body=b"5")

    handlers = {"hangs": hangs, "fails": fails, "endless": endless, "answers": answers}
    sockets = {name: await serve(name, scripted(handler)) for name, handler in handlers.items()}
    peers = HostPeers("router", {"dead": tmp_path / "dead", **sockets}, Log("test"))
    async with asyncio.timeout(PATIENCE):
        # On a busy machine even the one that answers may be late.
        while (active := await peers.active()) == 0:
            pass
    assert active == 5


async def test_an_order_that_a_running_process_may_not_have_followed_is_an_error(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator who drains a host must not take a process for drained that was only busy."""
    monkeypatch.setattr(host_peers, "ASK_SECONDS", PATIENCE)

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    async def answers(request: web.Request) -> web.Response:
        return web.Response(body=b"5")

    killed = tmp_path / "killed"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(killed))
    ended = {"answers": await serve("answers", scripted(answers)), "killed": killed, "ended": tmp_path / "x"}
    assert await HostPeers("router", ended, Log("test")).pause(True) == 5
    peers = HostPeers("router", {**ended, "hangs": await serve("hangs", scripted(hangs))}, Log("test"))
    monkeypatch.setattr(host_peers, "ASK_SECONDS", 0.3)

    async def blamed(order: Callable[[], Awaitable[object]]) -> str:
        with pytest.raises(Unavailable, match=" did not answer") as caught:
            await order()
        return str(caught.value).partition(" did not answer")[0]

    for order in (lambda: peers.pause(True), peers.flush):
        async with asyncio.timeout(PATIENCE):
            # On a busy machine even the one that answers may be late, and is blamed as well.
            while (names := await blamed(order)) == "answers, hangs":
                pass
        assert names == "hangs"


async def test_questions_to_one_process_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_peers, "AT_ONCE", 2)
    monkeypatch.setattr(host_peers, "ASK_SECONDS", 60.0)
    asked, most, go = 0, 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await go.wait()
        asked -= 1
        return web.Response(body=b"1")

    peers = HostPeers("router", {"router.1": await serve("one", scripted(answer))}, Log("test"))
    questions = [asyncio.create_task(peers.active()) for _ in range(6)]
    await eventually(lambda: asked == 2)
    go.set()
    assert await asyncio.gather(*questions) == [1] * 6
    assert most == 2


async def test_an_abort_does_not_wait_for_questions(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any key may ask for timelines, as often as it likes."""
    monkeypatch.setattr(host_peers, "ASK_SECONDS", 60.0)
    go = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            await go.wait()
        return web.Response(body=b"1")

    peers = HostPeers("router", {"router.1": await serve("one", scripted(answer))}, Log("test"))
    questions = [asyncio.create_task(peers.active()) for _ in range(host_peers.AT_ONCE + 1)]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        assert await peers.abort(AbortOrder(None)) == 1
    go.set()
    assert await asyncio.gather(*questions) == [1] * len(questions)
