"""The real HTTP side on a loopback socket, in front of a scripted generator."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from common.checkpoint.generation_config import DefaultSampling
from common.observability.logs import Log
from router.api_routes import ApiRoutes
from router.auth.gates import Gate, OpenGate
from router.auth.origin import Cors, HostRule
from router.dispatch.generation import Generator
from router.dispatch.running_requests import RunningRequests
from router.exchange.host_peers import HostPeers
from router.http.client import View
from router.images.loader import ImageLoader, RefusingImageLoader
from router.nodes.pool_load import PoolLoad
from router.parts import ApiParts
from router.process.spawner import Spawner
from router.requests.checks import ServedModel
from router.requests.field_rules import UnknownFields
from router.routes.status import ClusterView
from router.server.connections import ConnectionLimit
from router.server.http_server import http_runner
from router.server.listeners import application
from router.templates.chat_template import ChatTemplate
from router.text.service import TextService, Workers
from router.text.work import TextWork
from router.tokens.tokenizer import Tokenizer
from router.tokens.tokenizer_info import tokenizer_info
from tests.fakes.text_fork_server import text_fork_program
from tests.fakes.text_workers import InProcess
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.scripted_generator import ScriptedGenerator

TINY = Path(__file__).parents[3] / "deploy/tiny_models/tiny-target"
MAX_BODY = 600_000
SERVED = ServedModel("tiny-target", str(TINY), 1_700_000_000, 704, 4096, (2,), DefaultSampling())


@pytest.fixture
def text_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whole routers fork their text workers, which take most of the time to start; text/ starts real ones."""
    monkeypatch.setattr("router.build.Spawner", partial(Spawner, text_fork_program()))
    monkeypatch.setattr("router.text.pool.SMALL_SECONDS", PATIENCE)  # no test is about a slow one of these


@dataclass
class Rig:
    """A running server. `ready`, `missing` and `admit` are read at each request."""

    host: str
    port: int
    generator: ScriptedGenerator
    tokenizer: Tokenizer
    session: aiohttp.ClientSession
    ready: str | None = None
    missing: list[dict[str, str]] = field(default_factory=list)
    refusal: Exception | None = None
    running: RunningRequests = field(default_factory=RunningRequests)
    paths: list[str] = field(default_factory=list)  # all routes
    active: int = 0  # as /load and /flush_cache see it
    on_nodes: int = 0  # running requests
    unreached: list[str] = field(default_factory=list)  # nodes that a flush does not reach
    flushes: int = 0

    def flush(self) -> list[str]:
        self.flushes += 1
        return self.unreached

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Return (status, JSON, lower-case headers). `body`: bytes are sent unchanged, other values as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        async with self.session.post(self.url + path, data=raw, headers=headers) as response:
            found = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), found

    async def raw(self, path: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        """Return the body of a streamed answer."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            return await response.read()

    async def settled(self, closed: int) -> None:
        """Wait until the generator has seen `closed` early closes and is idle."""
        await eventually(lambda: len(self.generator.closed) >= closed and not self.generator.active)


Serve = Callable[..., Awaitable[Rig]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture
async def spawner(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Spawner]:
    """Its processes have time to end by themselves, however busy the machine is."""
    monkeypatch.setattr("router.process.spawner.OWN_END_SECONDS", PATIENCE)
    made = Spawner()
    yield made
    await made.close()


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Start servers: `await serve(write_timeout=..., ...)`.

    Without `workers`, texts are processed in this process. `source` replaces the scripted generator.
    """
    runners: list[web.AppRunner] = []
    sessions: list[aiohttp.ClientSession] = []

    async def start(
        write_timeout: float = 30.0,
        text: Tokenizer = tokenizer,
        served: ServedModel = SERVED,
        send_buffer: int | None = None,
        max_requests: int = 64,
        images: ImageLoader = RefusingImageLoader(),  # noqa: B008
        workers: Workers | None = None,
        gate: Gate | None = None,
        cors: Cors | None = None,
        limit: ConnectionLimit | None = None,
        strict_fields: bool = False,
        source: Generator | None = None,
    ) -> Rig:
        log = Log("test")
        open_gate = OpenGate(HostRule(("x",), Cors(())), View.CLUSTER, open_metrics=False)
        generator = ScriptedGenerator()
        work = workers or InProcess(TextWork(text, ChatTemplate(Path(served.path))))
        texts = TextService(work, text, UnknownFields(log, strict_fields))
        info = tokenizer_info(Path(served.path), None)
        rig: Rig

        # `rig` is made last, because it has the address.
        class Models:
            def served(self) -> ServedModel:
                return served

            def admitting(self) -> ServedModel:
                if rig.refusal is not None:
                    raise rig.refusal
                return served

        async def series(accept: str) -> tuple[bytes, str]:
            return b"# HELP x y\n", "text/plain; version=0.0.4; charset=utf-8"

        class Cluster:
            active = property(lambda self: rig.active)
            running = property(lambda self: rig.running)

        view = ClusterView(
            lambda: rig.ready,
            lambda: rig.missing,
            lambda asked: {"model_path": served.path, "internal_states": [], "view": asked.name},
            series,
            lambda identity: {"request_id": identity, "client": "team-a"} if identity == "known" else None,
            lambda count, client: [
                {
                    "request_id": f"{count} of {client}",
                    "outcome": "stop",
                    "nodes": [],
                    "age": 1.0,
                    "stages": {"received": 0.0},
                }
            ],
            lambda: PoolLoad(rig.on_nodes, used=96, total=1024, prompts=40),
        )
        routes = ApiRoutes(
            ApiParts(text, info, texts, images, max_requests),
            Models(),
            source or generator,
            Cluster(),
            lambda: rig.flush(),
            view,
            HostPeers("router", {}, log),
            log,
        )
        app = application(gate or open_gate, cors or Cors(()), MAX_BODY, log, (routes.add_to,))
        runner = http_runner(app, limit, write_timeout)
        runners.append(runner)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer is not None:  # inherited by connections, so that a slow reader is noticed soon
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        await web.SockSite(runner, listener).start()
        host, port = runner.addresses[0][:2]
        sessions.append(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)))
        rig = Rig(host, port, generator, text, sessions[-1])
        rig.paths = [resource.canonical for resource in app.router.resources()]
        return rig

    yield start
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture(params=["read here", "read by a worker"])
def both_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice: bodies are read in the router's process, and by a text worker as large ones are."""
    if request.param == "read by a worker":
        monkeypatch.setattr("router.text.service.MAX_READ_HERE", -1)


@pytest.fixture
async def rig(serve: Serve) -> Rig:
    return await serve()
