"""Answers that are written with their head have the head that aiohttp would write."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.auth.gates import KeyGate
from router.auth.keys import KeyRing
from router.auth.origin import Cors
from router.auth.quotas import Quotas
from router.http.direct_answer import DirectAnswer
from router.http.errors import request_id_key
from router.http.json_answer import send_json
from router.http.sse import SseWriter
from router.server.http_server import http_runner, leave
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE
from tests.unit.router.conftest import Serve
from tests.unit.router.scripted_generator import one_by_one

PAGE = "https://page.example"
BODY = {"prompt": [300, 301], "max_tokens": 1}
MESSAGE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
# Anthropic's clients read the id under another name.
ROUTES = {"/v1/completions": (BODY, False), "/v1/messages": (MESSAGE, True)}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("keys", [False, True])
async def test_the_head_is_that_of_an_ordinary_response(serve: Serve, keys: bool, path: str) -> None:
    body, anthropic = ROUTES[path]
    key = api_key("secret", "a", requests_per_minute=100)
    gate = KeyGate(KeyRing([key], lambda: 0.0), Quotas(Clock()), None, False, False) if keys else None
    rig = await serve(gate=gate, cors=Cors((PAGE,)) if keys else None)
    heads = []
    for connection in ("keep-alive", "close"):
        rig.generator.will(*one_by_one([50]))
        own = {"Connection": connection, "X-Request-Id": "an-id", "Host": "x"}
        headers = own | ({"Origin": PAGE, **bearer("secret")} if keys else {})
        status, answer, head = await rig.post(path, body, headers)
        assert status == 200
        assert answer["id"].endswith("an-id")
        # The quota is smaller at the second request.
        heads.append(
            {name: value for name, value in head.items() if "remaining" not in name and "reset" not in name}
        )
    direct, ordinary = heads
    assert ordinary.pop("connection") == "close"
    assert direct.pop("date")[:16] == ordinary.pop("date")[:16]
    assert direct == ordinary
    assert (direct["x-request-id"], direct["server"]) == ("an-id", "tandem")
    assert direct.get("request-id") == ("an-id" if anthropic else None)
    assert ("access-control-allow-origin" in direct) == ("x-ratelimit-limit-requests" in direct) == keys


@pytest.mark.parametrize("path", ROUTES)
async def test_the_head_of_a_stream_is_that_of_an_ordinary_one_and_arrives_with_its_first_events(
    serve: Serve, path: str
) -> None:
    body, anthropic = ROUTES[path]
    gate = KeyGate(KeyRing([api_key("secret", "a")], lambda: 0.0), Quotas(Clock()), None, False, False)
    rig = await serve(gate=gate, cors=Cors((PAGE,)))
    data, heads = json.dumps({**body, "stream": True}).encode(), []
    for connection in ("keep-alive", "close"):
        rig.generator.will(*one_by_one([50]))
        reader, writer = await asyncio.open_connection(rig.host, rig.port)
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Request-Id: an-id\r\n"
            b"Authorization: Bearer secret\r\nOrigin: %b\r\nConnection: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (path.encode(), PAGE.encode(), connection.encode(), len(data), data)
        )
        async with asyncio.timeout(PATIENCE):
            received = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        head, _, events = received.decode().partition("\r\n\r\n")
        status, *lines = head.split("\r\n")
        assert status == "HTTP/1.1 200 OK"
        assert "data: {" in events
        heads.append({name.lower(): value for name, value in (line.split(": ", 1) for line in lines)})
    direct, ordinary = heads
    assert ordinary.pop("connection") == "close"
    assert direct.pop("date")[:16] == ordinary.pop("date")[:16]
    assert direct == ordinary
    assert (direct["access-control-allow-origin"], direct["server"]) == (PAGE, "tandem")
    assert (direct["x-request-id"], direct.get("request-id")) == ("an-id", "an-id" if anthropic else None)


async def json_answer(request: web.Request) -> web.StreamResponse:
    request[request_id_key] = "an-id"
    return await send_json(request, [b"{}"])


async def stream(request: web.Request) -> web.StreamResponse:
    request[request_id_key] = "an-id"
    writer = SseWriter(request)
    await writer.start(b"data: {}\n\n")
    return await writer.finish(b"")


@pytest.mark.parametrize("path", ["/json", "/stream"])
async def test_connections_of_a_listener_that_others_replace_end_with_their_next_answers(path: str) -> None:
    """Otherwise a client that keeps one busy would hold up the drain until its timeout."""
    app = web.Application()
    app.router.add_get("/json", json_answer)
    app.router.add_get("/stream", stream)
    runner = http_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asked = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    opened = [await asyncio.open_connection(*runner.addresses[0][:2]) for _ in range(2)]
    try:
        async with asyncio.timeout(PATIENCE):
            for reader, writer in opened:
                writer.write(asked)
                assert b"Connection: close" not in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"{}" if path == "/json" else b"\r\n0\r\n\r\n")
            leave(runner)
            opened.append(await asyncio.open_connection(*runner.addresses[0][:2]))
            for reader, writer in opened:
                writer.write(asked)
                assert b"Connection: close\r\n" in await reader.readuntil(b"\r\n\r\n")
                assert b"{}" in await reader.read()
    finally:
        for _, writer in opened:
            writer.close()
        await runner.cleanup()


async def test_pipelined_requests_are_answered_in_order_on_one_connection(serve: Serve) -> None:
    rig = await serve()
    rig.generator.scripts = [one_by_one([token]) for token in (50, 51)]
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    data = json.dumps(BODY).encode()
    for identity in ("first", "second"):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (identity.encode(), len(data), data)
        )
    try:
        async with asyncio.timeout(PATIENCE):
            for identity in ("first", "second"):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = json.loads(await reader.readexactly(int(fields["Content-Length"])))
                assert (fields["X-Request-Id"], body["id"]) == (identity, f"cmpl-{identity}")
    finally:
        writer.close()


async def test_a_client_that_has_left_is_a_connection_error() -> None:
    request = make_mocked_request("POST", "/")
    request.transport.is_closing.return_value = True  # type: ignore[union-attr]
    answer: web.StreamResponse = DirectAnswer(request, b"x")
    with pytest.raises(ConnectionResetError):
        await answer.prepare(request)
