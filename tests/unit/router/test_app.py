"""The composed router: what it imports, and how it drains."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import zmq

from common.checkpoint.model_config import model_fingerprint
from common.config import load_cluster
from common.config.router_processes import RouterProcess
from common.errors import ConfigError
from common.messages.generation import OutputToken
from common.messages.node_inbox import Abort, Registered
from common.messages.router_inbox import FirstToken
from common.observability.logs import Log
from router.app import RouterApp
from router.build import build
from router.text.jobs import Job, JobAnswer, Payload
from tests.fakes.descriptors import open_descriptors
from tests.fakes.fake_node import FakeNode
from tests.fakes.router_rig import legs
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import TINY

pytestmark = pytest.mark.usefixtures("text_forks")

ONLY = RouterProcess(0, ())

REPOSITORY = Path(__file__).parents[3]


def test_the_router_needs_no_torch() -> None:
    """It imports no torch, transformers or node code: it starts quickly and runs on any machine."""
    program = (
        "import sys, router.__main__; "
        "heavy = {'torch', 'transformers', 'triton', 'safetensors'}; "
        "heavy |= {'prefill_node', 'decode_node', 'kv_transfer'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"""
model: {{path: "{TINY}"}}
router: {{port: 0, control_address: "ipc://{tmp_path}/c", placement_wait: 0.1}}
health: {{drain_timeout: 1.0}}
process: {{run_dir: "{tmp_path}/r"}}
prefill: {{nodes: [{{name: p0}}]}}
decode: {{nodes: [{{name: d0}}]}}
"""
    )
    return file


async def test_without_nodes_and_while_draining(cluster: Path) -> None:
    app = build(load_cluster(cluster, []), ONLY, Log("test"))
    await app.start()
    app.core.control.refused_messages = 3  # test_control_plane.py tests the counting
    host, port = app.http.public.addresses[0][:2]
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        async with session.get("/health") as response:
            assert (response.status, await response.read()) == (503, b"")
        async with session.get("/live") as response:
            assert response.status == 200
        async with session.get("/server_info") as response:
            info = await response.json()
            assert (info["ready"], info["nodes"], info["internal_states"]) == (False, [], [])
            assert info["config"]["model.path"]["origin"]
            assert info["refused_messages"] == 3
        async with session.get("/metrics") as response:
            said = await response.text()
            assert (
                'tandem_refused_messages_total{engine="router",model_name="tiny-target",role="router"} 3'
                in said
            )
            for path, own in (("/v1/chat/completions", "top_logprobs"), ("/v1/completions", "prompt")):
                assert {"min_p", "logit_bias", "min_tokens", own} < set(info["parameters"][path])
                assert not {"suffix", "user"} & set(info["parameters"][path])
        async with session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 503
            assert "prefill node" in (await response.json())["error"]["message"]
        async with session.get("/ready") as response:
            reason = (await response.json())["reason"]
            assert reason.startswith("no prefill node has been up for ")
            assert reason.endswith(" s; expected back: p0")
        async with session.get("/metrics") as response:
            assert 'tandem_requests_refused_without_node_total{role="prefill"} 1.0' in await response.text()
        app.availability.draining = True
        async with session.post("/v1/chat/completions", json=body) as response:
            assert response.status == 503
            assert "shutting down" in (await response.json())["error"]["message"]
        async with session.get("/ready") as response:
            assert (await response.json())["reason"] == "draining"
        async with session.get("/v1/models") as response:
            assert response.status == 200
    await asyncio.wait_for(app.drain(), PATIENCE)


def node_of(context: zmq.Context[zmq.Socket[bytes]], app: RouterApp, name: str) -> FakeNode:
    """Make a node of the cluster file whose registration matches the file."""
    expected = app.core.control.rules.nodes[name]
    return FakeNode(
        context,
        app.core.control.address,
        expected.role,
        name,
        fingerprint=model_fingerprint(TINY),
        peer_address=expected.peer_address,
        max_model_len=expected.min_model_len,
        total_pages=expected.pages or 1,
    )


async def test_missing_nodes_of_the_cluster_file_are_named(cluster: Path) -> None:
    """The answer is 200 while each role has a node; a draining node is missing, one that is in no file is ignored."""
    nodes = ["prefill.nodes=[{name: p0}, {name: p1}]", "health.node_timeout=600"]
    app = build(load_cluster(cluster, nodes), ONLY, Log("test"))
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    context = zmq.Context[zmq.Socket[bytes]]()
    up = [
        node_of(context, app, "p1"),
        node_of(context, app, "d0"),
    ]
    for node in up:
        assert isinstance(await node.register(), Registered)
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        missing = [{"name": "p0", "role": "prefill"}]
        async with session.get("/ready") as response:
            assert (response.status, await response.json()) == (
                200,
                {"status": "degraded", "missing": missing},
            )
        async with session.get("/server_info") as response:
            assert (await response.json())["missing_nodes"] == missing
        last = node_of(context, app, "p0")
        assert isinstance(await last.register(), Registered)
        async with session.get("/ready") as response:
            assert await response.json() == {"status": "ready"}
        last.beat(state="draining")
        await eventually(lambda: app.availability.missing_nodes() == missing)
    for node in (*up, last):
        node.close()
    context.term()
    await asyncio.wait_for(app.drain(), PATIENCE)


async def test_what_is_not_done_in_time_ends_with_an_error(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream ends with an error event and no [DONE], other requests with 503; both nodes get aborts."""
    monkeypatch.setattr("router.server.http_server.SHUTDOWN_SECONDS", PATIENCE)
    app = build(
        load_cluster(cluster, ["health.drain_timeout=0.2", "health.node_timeout=600"]),
        RouterProcess(0, ()),
        Log("test"),
    )
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    context = zmq.Context[zmq.Socket[bytes]]()
    prefill = node_of(context, app, "p0")
    decode = node_of(context, app, "d0")
    body = {"prompt": "hi", "max_tokens": 5}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for node in (prefill, decode):
            assert isinstance(await node.register(), Registered)
        begun = asyncio.create_task(session.post("/v1/completions", json={**body, "stream": True}))
        _, prompt = await legs(prefill, decode)
        prefill.say(FirstToken(room=prompt.room, token=OutputToken(50), finish_reason=None, cached_tokens=0))
        stream = await begun
        waits = asyncio.create_task(session.post("/v1/completions", json=body))
        _, late = await legs(prefill, decode)
        await asyncio.wait_for(app.drain(), PATIENCE)
        refused = await waits
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        *_, last, end = (await stream.read()).decode().split("\n\n")
        assert end == ""
        for error in (json.loads(last.removeprefix("data: ")), await refused.json()):
            assert "shutting down" in error["error"]["message"]
            assert error["error"]["code"] == "unavailable"
        for node in (prefill, decode):
            assert {(await node.expect(Abort)).room for _ in range(2)} == {prompt.room, late.room}
            node.close()
    context.term()


async def test_the_first_token_of_a_stream_is_held_as_the_cluster_file_says(cluster: Path) -> None:
    app = build(
        load_cluster(cluster, ["router.first_token_hold_ms=60", "health.node_timeout=600"]), ONLY, Log("test")
    )
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    context = zmq.Context[zmq.Socket[bytes]]()
    prefill, decode = node_of(context, app, "p0"), node_of(context, app, "d0")
    body = {"prompt": "hi", "max_tokens": 5, "stream": True}
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for node in (prefill, decode):
            assert isinstance(await node.register(), Registered)
        begun = asyncio.create_task(session.post("/v1/completions", json=body))
        _, prompt = await legs(prefill, decode)
        sent = loop.time()
        prefill.say(FirstToken(room=prompt.room, token=OutputToken(50), finish_reason=None, cached_tokens=0))
        stream = await asyncio.wait_for(begun, PATIENCE)
        assert loop.time() - sent >= 0.059, "the event loop counts whole milliseconds"
        decode.tokens(prompt.room, 1, [51], "length")
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(app.drain(), PATIENCE)
    for node in (prefill, decode):
        node.close()
    context.term()


async def test_a_request_whose_text_is_worked_on_is_finished_before_the_router_ends(cluster: Path) -> None:
    """It was accepted although no node has it yet."""
    drain = f"health.drain_timeout={PATIENCE}"
    app = build(load_cluster(cluster, [drain, "health.node_timeout=600"]), ONLY, Log("test"))
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    context = zmq.Context[zmq.Socket[bytes]]()
    prefill, decode = node_of(context, app, "p0"), node_of(context, app, "d0")
    run, asked, go_on = app.children.texts.run, asyncio.Event(), asyncio.Event()

    async def held(job: Job, payload: Payload) -> JobAnswer:
        asked.set()
        await go_on.wait()
        return await run(job, payload)

    app.children.texts.run = held  # type: ignore[method-assign]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        for node in (prefill, decode):
            assert isinstance(await node.register(), Registered)
        begun = asyncio.create_task(session.post("/v1/chat/completions", json=body))
        await asked.wait()
        drained = asyncio.create_task(app.drain())
        await asyncio.sleep(0.1)
        go_on.set()
        _, prompt = await legs(prefill, decode)
        prefill.say(
            FirstToken(room=prompt.room, token=OutputToken(50), finish_reason="stop", cached_tokens=0)
        )
        assert (await begun).status == 200
        await asyncio.wait_for(drained, PATIENCE)
    for node in (prefill, decode):
        node.close()
    context.term()


async def test_a_port_that_is_taken_for_a_moment(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous router may still be exiting."""
    monkeypatch.setattr("router.server.listeners.BIND_SECONDS", PATIENCE)
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = build(load_cluster(cluster, [f"router.port={port}"]), ONLY, Log("test"))
    started = asyncio.create_task(app.start())
    await asyncio.sleep(0.3)
    assert not started.done()
    server.close()
    await server.wait_closed()
    await asyncio.wait_for(started, PATIENCE)
    assert [address[1] for address in app.http.public.addresses] == [port]
    await asyncio.wait_for(app.drain(), PATIENCE)


async def test_a_port_that_is_taken_is_named(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server.listeners.BIND_SECONDS", 0.0)
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = build(load_cluster(cluster, [f"router.port={port}"]), ONLY, Log("test"))
    with pytest.raises(ConfigError, match=rf"^router\.port: another process listens on 127\.0\.0\.1:{port}"):
        await app.start()
    server.close()
    await server.wait_closed()


async def test_a_router_that_cannot_start_closes_everything(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin socket, the control socket and the text workers were open when the port was found taken."""
    monkeypatch.setattr("router.server.listeners.BIND_SECONDS", 0.0)
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    app = build(
        load_cluster(cluster, [f"router.port={server.sockets[0].getsockname()[1]}"]), ONLY, Log("test")
    )
    control = Path(app.core.control.address.removeprefix("ipc://"))
    assert control.exists()
    with pytest.raises(ConfigError):
        await app.start()
    assert not control.exists()
    assert not app.http.plan.admin_socket.exists()
    assert app.link.context.closed
    assert app.children.spawner.pid is not None
    assert not Path(f"/proc/{app.children.spawner.pid}").exists()
    server.close()
    await server.wait_closed()


async def test_a_router_that_cannot_be_built_closes_everything(cluster: Path, tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file of somebody else")
    resolved = load_cluster(cluster, [f"process.event_log={tmp_path}/events"])
    before = open_descriptors()
    with pytest.raises(ConfigError, match="in the way and not a socket"):
        build(resolved, ONLY, Log("test"))
    assert open_descriptors() <= before


@pytest.mark.parametrize("has_one", [False, True])
async def test_a_model_without_a_chat_template_is_announced(
    cluster: Path, tmp_path: Path, has_one: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    model = tmp_path / "bare"
    shutil.copytree(load_cluster(cluster).model_path, model)
    if not has_one:
        (model / "chat_template.jinja").unlink()
    app = build(load_cluster(cluster, [f"model.path={model}"]), ONLY, Log("test"))
    try:
        said = [record for record in caplog.records if "no chat template" in record.getMessage()]
        assert bool(said) is not has_one
    finally:
        await app.drain()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
async def test_a_host_that_is_not_ours_is_blamed_and_not_the_port(cluster: Path, host: str) -> None:
    """192.0.2.0/24 is reserved for documentation: no machine has it."""
    app = build(
        load_cluster(cluster, [f"router.host={host}", "security.open_http=true"]),
        RouterProcess(0, ()),
        Log("test"),
    )
    with pytest.raises(ConfigError, match=rf"^router\.host: this host has no address {host}; write 127"):
        await app.start()


@pytest.mark.parametrize("key", ["router.images.fetch_hosts=[a.example]", "prefill.image_cache_mib=1"])
def test_settings_of_images_are_refused_where_the_model_takes_none(cluster: Path, key: str) -> None:
    """No option is read and then ignored; more likely the model is not the intended one."""
    path, _, _ = key.partition("=")
    with pytest.raises(
        ConfigError, match=rf"{path}: .* would have no effect: this model takes no images; .*--set"
    ):
        build(load_cluster(cluster, [key]), ONLY, Log("test"))


def test_snapshots_are_refused_where_the_model_keeps_no_state(cluster: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"prefill\.state_snapshots: 9 would have no effect: this model keeps no state"
    ):
        build(load_cluster(cluster, ["prefill.state_snapshots=9"]), ONLY, Log("test"))


async def test_a_router_that_leaves_its_port_to_others_answers_on_connections_that_are_idle_for_a_moment(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.LINGER_SECONDS", PATIENCE)  # the moment may be long on a busy machine
    app = build(
        load_cluster(cluster, ["health.drain_timeout=600"]),
        RouterProcess(0, (1,)),
        Log("test"),
    )
    await app.start()
    host, port = app.http.public.addresses[0][:2]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        async with session.get("/live") as response:
            assert response.status == 200
        drained = asyncio.create_task(app.drain())
        await asyncio.sleep(0.1)
        assert app.http.open_connections == 1
        async with session.post("/v1/completions", json={"prompt": "hi"}) as response:
            assert "prefill node" in (await response.json())["error"]["message"], "not that it shuts down"
            assert response.headers["Connection"] == "close"
        async with asyncio.timeout(PATIENCE):
            await drained
