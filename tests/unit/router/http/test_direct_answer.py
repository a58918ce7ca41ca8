"""Answers that are written with their head have the head that aiohttp would write."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.auth.gates import KeyGate
from router.auth.keys import KeyRing
from router.auth.limits import Quotas
from router.auth.origin import Cors
from router.http.direct_answer import DirectAnswer
from router.http.errors import request_id_key
from router.http.json_answer import PIECE, send_json
from router.server.http_server import http_runner
from tests.fakes.api_keys import api_key, bearer
from tests.fakes.clock import Clock
from tests.fakes.waiting import PATIENCE, eventually
from tests.unit.router.conftest import Serve
from tests.unit.router.scripted_generator import one_by_one

PAGE = "https://page.example"
BODY = {"prompt": [300, 301], "max_tokens": 1}
PIPELINED = 40


@pytest.mark.parametrize("keys", [False, True])
async def test_the_head_is_that_of_an_ordinary_response(serve: Serve, keys: bool) -> None:
    key = api_key("secret", "a", requests_per_minute=100)
    gate = KeyGate(KeyRing([key], lambda: 0.0), Quotas(Clock()), None, False, False) if keys else None
    rig = await serve(gate=gate, cors=Cors((PAGE,)) if keys else None)
    heads = []
    for connection in ("keep-alive", "close"):
        rig.generator.will(*one_by_one([50]))
        own = {"Connection": connection, "X-Request-Id": "an-id", "Host": "x"}
        headers = own | ({"Origin": PAGE, **bearer("secret")} if keys else {})
        status, answer, head = await rig.post("/v1/completions", BODY, headers)
        assert status == 200
        assert answer["choices"][0]["finish_reason"] == "length"
        # The quota is smaller at the second request.
        heads.append(
            {name: value for name, value in head.items() if "remaining" not in name and "reset" not in name}
        )
    direct, ordinary = heads
    assert ordinary.pop("connection") == "close"
    assert direct.pop("date")[:16] == ordinary.pop("date")[:16]
    assert direct == ordinary
    assert direct["x-request-id"] == "an-id"
    assert ("access-control-allow-origin" in direct) == ("x-ratelimit-limit-requests" in direct) == keys


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
    answer: web.StreamResponse = DirectAnswer(request, b"x", PATIENCE)
    with pytest.raises(ConnectionResetError):
        await answer.prepare(request)


class Sender:
    """A client that sends PIPELINED requests at once, and what the server knows of it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.reader = reader
        self.handled = 0
        self.most_buffered = 0  # bytes that the server held for the client when a request was handled
        self.protocol: web.RequestHandler | None = None

    def stopped(self) -> bool:
        """Return whether the server waits until the client reads."""
        return self.protocol is not None and self.protocol.writing_paused

    def ended(self) -> bool:
        """Return whether the server has ended the connection."""
        return self.protocol is not None and not self.protocol.connected


@asynccontextmanager
async def pipelining(write_timeout: float) -> AsyncIterator[Sender]:
    """Yield a client that has sent its requests, each of which is answered with PIECE bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        # so that the kernel holds less than one answer
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        sender.most_buffered = max(sender.most_buffered, request.transport.get_write_buffer_size())
        sender.handled += 1
        sender.protocol = request.protocol
        request[request_id_key] = "an-id"
        return await send_json(request, [b"x" * PIECE], write_timeout)

    app = web.Application()
    app.router.add_get("/", handle)
    runner = http_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2], limit=1024)
        sender = Sender(reader)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * PIPELINED)
        try:
            yield sender
        finally:
            writer.transport.abort()
    finally:
        await runner.cleanup()


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    """Its other requests are not handled, so that its answers do not pile up."""
    async with pipelining(write_timeout=0.05) as sender:
        await eventually(sender.ended)
        assert sender.handled < PIPELINED
        assert sender.most_buffered <= 2 * PIECE


async def test_a_client_that_pauses_gets_every_answer() -> None:
    async with pipelining(write_timeout=PATIENCE) as sender, asyncio.timeout(PATIENCE):
        await eventually(sender.stopped)
        assert sender.handled < PIPELINED
        for _ in range(PIPELINED):
            head = await sender.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert await sender.reader.readexactly(PIECE) == b"x" * PIECE
        assert sender.handled == PIPELINED
        assert sender.most_buffered <= 2 * PIECE
