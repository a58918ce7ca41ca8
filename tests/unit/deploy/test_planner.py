"""The planner against a router and an API server of Kubernetes that a test scripts."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from common.errors import ConfigError, NoAnswer
from common.observability.logs import Log
from deploy import planner_cli
from deploy.cluster_sample import Buckets, ClusterSample
from deploy.planning.changers import KubernetesScaler, RoleChanger
from deploy.planning.decision import Move, Scale
from deploy.planning.observing import Observer
from deploy.planning.planner import Planner, PlannerLoop
from deploy.planning.routers import Routers
from deploy.planning.settings import KubernetesTarget, PlannerSettings, read_settings
from tests.fakes.waiting import PATIENCE

SETTINGS = PlannerSettings(first_token_ms=500, gap_ms=50, window=2, interval=0.5, cool_down=0.01)
KEY = "secret"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planner wait for servers of this process, which may be kept from running, longer than for a network."""
    for module in ("routers", "changers"):
        monkeypatch.setattr(f"deploy.planning.{module}.ANSWER_SECONDS", PATIENCE)


@dataclass
class FakeRouter:
    """Answers /server_info and /metrics, and changes roles."""

    roles: dict[str, str]
    movable: bool = True
    ready: bool = True
    missing: list[str] = field(default_factory=list)  # names of nodes of the cluster file
    admin: bool = True  # what answers is the admin listener
    queued_ms: float = 800.0  # of prefill nodes
    reads: int = 0
    changes: list[tuple[str, Any]] = field(default_factory=list)
    other_lines: int = 0  # of /metrics
    drain_seconds: float = 0.0  # of a change
    refusal: int = 0  # status with which a change is refused

    def routes(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/workers/{name}/role", self.role)
        return app

    async def info(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({}, status=403)
        nodes = [self._node(name, role) for name, role in self.roles.items()]
        own = {"incarnation": "x"} if self.admin else {}
        missing = [{"name": name, "role": "decode"} for name in self.missing]
        return web.json_response({"ready": self.ready, "nodes": nodes, "missing_nodes": missing, **own})

    def _node(self, name: str, role: str) -> dict[str, Any]:
        load = {"queued": 0, "running": 2, "transferring": 0, "queued_ms": 0.0}
        load |= {"free_pages": 80, "cached_pages": 10, "total_pages": 100}
        if role == "prefill":
            load["queued_ms"] = self.queued_ms
        counters = {"forward_seconds": 0.1 * self.reads if role == "prefill" else 0.0}
        return {
            "name": name,
            "role": role,
            "movable": self.movable,
            "state": "up",
            "load": load,
            "counters": counters,
        }

    async def metrics(self, request: web.Request) -> web.Response:
        self.reads += 1
        seen = 10 * self.reads
        lines = [
            *["tandem_other_series 123456789.0"] * self.other_lines,
            f'vllm:time_to_first_token_seconds_bucket{{le="0.5"}} {seen / 2}',
            f'vllm:time_to_first_token_seconds_bucket{{le="1.0"}} {seen}',
            f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {seen}',
            f"vllm:inter_token_latency_seconds_sum {0.01 * seen}",
            f'vllm:inter_token_latency_seconds_bucket{{le="+Inf"}} {seen}',
            "tandem_requests_waiting_for_room 0",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def role(self, request: web.Request) -> web.Response:
        name, body = request.match_info["name"], await request.json()
        self.changes.append((name, body))
        await asyncio.sleep(self.drain_seconds)
        if self.refusal:
            return web.json_response({"error": {"message": "it is starting"}}, status=self.refusal)
        previous, self.roles[name] = self.roles[name], body["role"]
        return web.json_response({"name": name, "role": body["role"], "previous": previous, "drained": 2})


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("/")).rstrip("/")


async def run_until(router: FakeRouter, url: str, done: Callable[[], bool], **options: Any) -> None:
    """Run a planner that moves nodes until `done`."""
    routers = Routers(url, KEY)
    planner = Planner(SETTINGS.limits(), Observer(0.9, 5))
    loop = PlannerLoop(
        planner,
        routers,
        RoleChanger(routers, 30.0),
        options.pop("interval", 0.01),
        options.pop("dry_run", False),
        Log("planner"),
    )
    async with asyncio.timeout(PATIENCE):
        await loop.run(done)


async def test_a_node_is_moved_and_the_next_window_is_new() -> None:
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"})
    async with serving(router.routes()) as url:
        await run_until(router, url, lambda: bool(router.changes))
        assert router.changes == [("decode-0", {"role": "prefill", "timeout": 30.0})]
        # The first reading is compared with none, and two observations have to agree.
        assert router.reads == 3
        # The last decode node stays.
        await run_until(router, url, lambda: router.reads > 12)
    assert len(router.changes) == 1


async def test_a_refused_change_is_tried_again_after_the_cool_down() -> None:
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}, refusal=409)
    async with serving(router.routes()) as url:
        with pytest.raises(NoAnswer, match="409: it is starting"):
            await RoleChanger(Routers(url, KEY), 1.0).apply(Move("decode-0", "prefill"))
        await run_until(router, url, lambda: len(router.changes) == 3)


async def test_long_answers_are_read_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of some hundred nodes have megabytes, which arrive in many pieces."""
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode"}, other_lines=20_000)
    async with serving(router.routes()) as url:
        (sample,) = (await Routers(url, KEY).read()).values()
    assert sample.first_tokens.total == 10
    assert sample.gap_seconds == pytest.approx(0.1)
    monkeypatch.setattr("deploy.planning.routers.MAX_BYTES", 100_000)
    async with serving(router.routes()) as url:
        with pytest.raises(OSError, match="more than 100000 bytes"):
            await Routers(url, KEY).read()


async def test_a_change_may_take_longer_than_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp ends every request after five minutes unless told otherwise, here sooner."""
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.1))
    router = FakeRouter({"decode-0": "decode"}, drain_seconds=0.3)
    async with serving(router.routes()) as url:
        assert '"role": "prefill"' in await RoleChanger(Routers(url, KEY), 1.0).apply(
            Move("decode-0", "prefill")
        )


async def test_a_dry_run_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"})
    async with serving(router.routes()) as url:
        await run_until(router, url, lambda: router.reads == 6, dry_run=True)
    assert router.changes == []
    first = next(each for each in caplog.records if each.message == "would change")
    assert vars(first)["fields"] == {
        "kind": "move",
        "name": "decode-0",
        "role": "prefill",
        "reason": "prefill is short of nodes, and decode can spare one",
    }


async def test_what_cannot_be_changed_is_refused_at_the_start() -> None:
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode"}, movable=False, ready=False)
    async with serving(router.routes()) as url:
        # While nodes are missing, nobody knows which are movable.
        await run_until(router, url, lambda: router.reads == 2)
        router.ready, router.missing = True, ["flex-0"]
        await run_until(router, url, lambda: router.reads == 4)
        router.missing = []
        with pytest.raises(ConfigError, match="no node of this cluster can change its role"):
            await run_until(router, url, lambda: False)
        router.movable, router.admin = True, False
        with pytest.raises(ConfigError, match="roles are changed on the admin listener"):
            await run_until(router, url, lambda: False)
        with pytest.raises(ConfigError, match="scope admin"):
            await Routers(url, "wrong").read()
    with pytest.raises(ConfigError, match="is not an http or https URL"):
        Routers("ftp://host", None)


def reading(at: float, firsts: int, gaps: int, transferring: int = 0, busy: float = 0.0) -> ClusterSample:
    """Return a reading of one prefill and one decode node."""
    load = {"queued": 0, "running": 2, "transferring": transferring, "queued_ms": 300.0}
    load |= {"free_pages": 50, "cached_pages": 10, "total_pages": 100}
    nodes = [
        {"name": role, "role": role, "state": "up", "movable": True, "load": load, "counters": counters}
        for role, counters in (
            ("prefill", {"forward_seconds": busy}),
            ("decode", {"forward_seconds": 0.0}),
        )
    ]
    first = Buckets({0.5: firsts / 2, 1.0: firsts, math.inf: firsts})
    return ClusterSample(at, {"nodes": nodes}, first, Buckets({math.inf: gaps}), 3, 0.02 * gaps)


def test_an_observation_is_what_has_happened_since_the_reading_before() -> None:
    observer = Observer(0.9, 5)
    assert observer.observe({"a": reading(10.0, 100, 1000, busy=4.0)}, {}) is None
    seen = observer.observe(
        {"a": reading(15.0, 110, 1100, transferring=6, busy=8.0), "b": reading(15.0, 7, 1100)}, {}
    )
    assert seen is not None
    # `b` was not read before. Each of the two has three requests that wait for room.
    assert (seen.first_token, seen.waiting_for_room) == (pytest.approx(0.9), 6)
    assert seen.gap == pytest.approx(0.02)
    assert (seen.queued, seen.busy, seen.running) == (0.3, pytest.approx(0.8), 2)
    # Of 40 % of the pages a quarter belongs to the two of eight requests that are generated.
    assert seen.pool_use == pytest.approx(0.1)
    # `a` was restarted, and so were both nodes.
    again = observer.observe({"a": reading(20.0, 3, 0), "b": reading(20.0, 8, 0)}, {})
    assert again is not None
    assert (again.first_token, again.gap, again.busy) == (None, None, None)


@dataclass
class FakeApiServer:
    """The subresource `scale` of two StatefulSets."""

    replicas: dict[str, int]
    version: int = 7
    token: str = "first"
    patches: list[tuple[str, str]] = field(default_factory=list)

    def routes(self) -> web.Application:
        app = web.Application()
        path = "/apis/apps/v1/namespaces/tandem/statefulsets/{name}/scale"
        app.router.add_get(path, self.read)
        app.router.add_patch(path, self.patch)
        return app

    def _scale(self, name: str) -> Mapping[str, Any]:
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas[name]} if self.replicas[name] else {},
            "status": {"replicas": self.replicas[name]},
        }

    def _refused(self, request: web.Request) -> web.Response | None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status"}, status=401)
        if request.match_info["name"] not in self.replicas:
            return web.json_response({"kind": "Status"}, status=404)
        return None

    async def read(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.json_response(self._scale(request.match_info["name"]))

    async def patch(self, request: web.Request) -> web.Response:
        if refused := self._refused(request):
            return refused
        name, body = request.match_info["name"], json.loads(await request.text())
        self.patches.append((name, request.content_type))
        if body["metadata"]["resourceVersion"] != str(self.version):
            return web.json_response({"kind": "Status", "reason": "Conflict"}, status=409)
        self.version += 1
        self.replicas[name] = body["spec"]["replicas"]
        return web.json_response(self._scale(name))


def credentials(directory: Path, token: str = "first") -> str:
    (directory / "token").write_text(token)
    (directory / "namespace").write_text("tandem")
    return str(directory)


async def test_replicas_are_read_and_set_unless_somebody_else_has_set_them(tmp_path: Path) -> None:
    server = FakeApiServer({"prefill": 2, "decode": 0})
    async with serving(server.routes()) as url:
        scaler = KubernetesScaler(KubernetesTarget(server=url, credentials=credentials(tmp_path)))
        assert await scaler.replicas() == {"prefill": 2, "decode": 0}
        assert await scaler.apply(Scale("prefill", 3)) == "3 replicas"
        assert server.replicas == {"prefill": 3, "decode": 0}
        assert server.patches == [("prefill", "application/merge-patch+json")]
        with pytest.raises(NoAnswer, match="409"):
            await scaler.apply(Scale("decode", 1))
        # The token file has rotated.
        server.token = "second"
        with pytest.raises(ConfigError, match="401"):
            await scaler.replicas()
        credentials(tmp_path, "second")
        await scaler.replicas()
        assert await scaler.apply(Scale("decode", 1)) == "1 replicas"
        other = KubernetesTarget(server=url, credentials=str(tmp_path), decode="apps/v1/statefulsets/none")
        with pytest.raises(ConfigError, match=r"kubernetes\.decode: .*404"):
            await KubernetesScaler(other).check({})


async def test_a_planner_asks_for_one_replica_and_waits_for_it(tmp_path: Path) -> None:
    server = FakeApiServer({"prefill": 1, "decode": 1})
    router = FakeRouter({"prefill-0": "prefill", "decode-0": "decode"}, movable=False, admin=False)
    async with serving(server.routes()) as api, serving(router.routes()) as url:
        scaler = KubernetesScaler(KubernetesTarget(server=api, credentials=credentials(tmp_path)))
        planner = Planner(SETTINGS.limits(), Observer(0.9, 5))
        loop = PlannerLoop(planner, Routers(url, KEY), scaler, 0.01, False, Log("planner"))
        async with asyncio.timeout(PATIENCE):
            await loop.run(lambda: router.reads == 12)
            assert server.replicas == {"prefill": 2, "decode": 1}
            router.roles["prefill-1"] = "prefill"
            await loop.run(lambda: len(server.patches) == 2)
            router.roles["prefill-2"] = "prefill"
            turns = count()
            await loop.run(lambda: _rotated(next(turns), server, tmp_path) and len(server.patches) == 3)
        assert server.replicas == {"prefill": 4, "decode": 1}


def _rotated(turn: int, server: FakeApiServer, directory: Path) -> bool:
    """Replace the token, and some turns later the file. Returns whether both have happened."""
    if turn == 0:
        server.token = "second"
    if turn == 3:
        credentials(directory, "second")
    return turn >= 3


def test_the_api_server_of_the_pod_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.server"):
        KubernetesScaler(KubernetesTarget(credentials=str(tmp_path)), {})
    pod = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    with pytest.raises(ConfigError, match=r"kubernetes\.credentials: cannot read .*namespace"):
        KubernetesScaler(KubernetesTarget(credentials=str(tmp_path)), pod)
    KubernetesScaler(KubernetesTarget(credentials=credentials(tmp_path)), pod)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gap_ms: 5", "first_token_ms"),
        ("first_token_ms: 500\ngap_ms: 50\nwindows: 3", "unknown field `windows`"),
        ("first_token_ms: 500\ngap_ms: 50\nspare: 1.0", "spare"),
        ("first_token_ms: 500\ngap_ms: 50\nprefill: {min: 3, max: 2}", "prefill.min"),
        ("first_token_ms: 500\ngap_ms: 50\nkubernetes: {decode: statefulsets/decode}", "decode"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "planner.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_settings(file)
    result = CliRunner().invoke(_app(), [str(file), "http://127.0.0.1:1"])
    assert result.exit_code == planner_cli.EXIT_REFUSED
    assert "deploy/planner: " in result.output


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(planner_cli.run)
    return app


def test_settings_become_limits(tmp_path: Path) -> None:
    file = tmp_path / "planner.yaml"
    file.write_text("first_token_ms: 500\ngap_ms: 50\ndecode: {min: 2}\nkubernetes: {}\n")
    settings = read_settings(file)
    limits = settings.limits()
    assert (limits.first_token, limits.gap, limits.roles["decode"].least) == (0.5, 0.05, 2)
    assert settings.kubernetes == KubernetesTarget()
