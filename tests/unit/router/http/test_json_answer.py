"""Large answers are sent in pieces, and the loop serves others between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from router.http.errors import REQUEST_ID, request_id_key
from router.http.json_answer import PIECE, BodyPart, send_json
from router.server.http_server import http_runner
from tests.fakes.waiting import PATIENCE


@asynccontextmanager
async def answering(
    parts: Sequence[BodyPart], write_timeout: float = PATIENCE, ended: asyncio.Event | None = None
) -> AsyncIterator[tuple[str, int]]:
    """Yield the address of a server that answers every GET with `parts` and sets `ended` afterwards."""

    async def handle(request: web.Request) -> web.StreamResponse:
        request[request_id_key] = "an-id"
        try:
            return await send_json(request, parts)
        finally:
            if ended is not None:
                ended.set()

    app = web.Application()
    app.router.add_get("/", handle)
    runner = http_runner(app, write_timeout=write_timeout)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][:2]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "parts",
    [
        [b"[1", b",2]"],
        [b"[", b"7," * (4 * PIECE), b"7]"],
        [b"[", *[b"7,"] * PIECE, b"7]"],
        [b'"', b"x" * (PIECE - 1), b"y" * PIECE, b"z" * (PIECE + 1), b'"'],
        [b'"' + b"x" * (PIECE - 2) + b'"'],
        [b'"' + b"x" * (PIECE - 1) + b'"'],
    ],
)
async def test_a_large_answer_is_complete_and_no_write_is_large(
    parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = web.StreamResponse.write

    async def measured(self: web.StreamResponse, data: bytes) -> None:
        sizes.append(len(data))
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", measured)
    async with (
        answering(parts) as server,
        aiohttp.ClientSession() as session,
        session.get("http://{}:{}/".format(*server)) as response,
    ):
        body = await response.read()
        assert response.status == 200
        assert response.content_type == "application/json"
    whole = b"".join(parts)
    assert body == whole
    assert json.loads(body)
    assert max(sizes, default=0) <= PIECE
    if len(whole) > PIECE:
        assert response.headers[REQUEST_ID] == "an-id"
        assert sum(sizes) == len(whole)
        assert len(sizes) <= 2 * len(whole) / PIECE + 2


async def test_others_have_their_turn_while_a_large_answer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    turn = 0

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def note(self: web.StreamResponse, data: bytes) -> None:
        turns.append(turn)

    monkeypatch.setattr(web.StreamResponse, "write", note)
    async with answering([b"x" * (8 * PIECE)]) as server:
        _, writer = await asyncio.open_connection(*server)
        counting = asyncio.create_task(count())
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            while len(turns) < 8:
                await asyncio.sleep(0.01)
        counting.cancel()
        writer.close()
    assert len(set(turns)) == 8


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    size, ended = 256 * PIECE, asyncio.Event()
    async with answering([b"x" * size], write_timeout=0.05, ended=ended) as server:
        reader, writer = await asyncio.open_connection(*server, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            await ended.wait()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(size)
        writer.transport.abort()


async def test_an_answer_of_unknown_size_over_http_1_0_ends_with_its_connection() -> None:
    """Such a client knows no chunks: if it asked to keep the connection, it would wait for more until it times out."""
    async with answering([b"[1", iter([b",2", b"]"])]) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            assert (await reader.read()).endswith(b"[1,2]")
        writer.close()
