"""A client that does not read its answers is disconnected after a while, however they are written."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from router.http.errors import request_id_key
from router.http.json_answer import PIECE, send_json
from router.server.http_server import http_runner
from tests.fakes.waiting import PATIENCE, eventually

PIPELINED = 40
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def direct(request: web.Request) -> web.StreamResponse:
    return await send_json(request, [b"x" * PIECE])


async def ordinary(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * PIECE)


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
async def pipelining(answer: Answer, write_timeout: float) -> AsyncIterator[Sender]:
    """Yield a client that has sent its requests, each of which is answered with PIECE bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        # so that the kernel holds less than one answer
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        sender.most_buffered = max(sender.most_buffered, request.transport.get_write_buffer_size())
        sender.handled += 1
        sender.protocol = request.protocol
        request[request_id_key] = "an-id"
        return await answer(request)

    app = web.Application()
    app.router.add_get("/", handle)
    runner = http_runner(app, write_timeout=write_timeout)
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


@pytest.mark.parametrize("answer", [direct, ordinary])
async def test_a_client_that_does_not_read_is_disconnected(answer: Answer) -> None:
    """Its other requests are not handled, so that its answers do not pile up."""
    async with pipelining(answer, write_timeout=0.05) as sender:
        await eventually(sender.ended)
        assert sender.handled < PIPELINED
        assert sender.most_buffered <= 2 * PIECE


@pytest.mark.parametrize("answer", [direct, ordinary])
async def test_a_client_that_pauses_gets_every_answer(answer: Answer) -> None:
    async with pipelining(answer, write_timeout=PATIENCE) as sender, asyncio.timeout(PATIENCE):
        await eventually(sender.stopped)
        assert sender.handled < PIPELINED
        for _ in range(PIPELINED):
            head = await sender.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            assert await sender.reader.readexactly(PIECE) == b"x" * PIECE
        assert sender.handled == PIPELINED
        assert sender.most_buffered <= 2 * PIECE
