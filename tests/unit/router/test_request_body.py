"""Bodies being received: their total is bounded, and no count leaks."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from common.observability.logs import Log
from router import request_body
from router.http_errors import error_middleware
from router.http_server import http_runner
from router.request_body import read_body, reading_key
from tests.fakes.waiting import PATIENCE, eventually

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
HEAD += b"Content-Length: %d\r\n\r\n"


async def size_of_body(request: web.Request) -> web.Response:
    return web.json_response({"bytes": len(await read_body(request))})


async def test_bodies_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow clients never finish; a client that disconnects returns its share."""
    monkeypatch.setattr(request_body, "MAX_READING", 2500)
    app = web.Application(client_max_size=2000, middlewares=[error_middleware(Log("test"))])
    app.router.add_post("/", size_of_body)
    runner = http_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = runner.addresses[0][:2]

        async def ask(size: int) -> tuple[int, dict[str, object], bytes]:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD % size + b"x" * size)
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(body), head

        _, slow = await asyncio.open_connection(*address)
        slow.write(HEAD % 1900 + b"x" * 1800)
        await eventually(lambda: app[reading_key].count == 1800)
        status, answer, head = await ask(1000)
        assert (status, answer["error"]["code"]) == (503, "overloaded")  # type: ignore[index]
        assert b"Retry-After: 1" in head
        assert (await ask(600))[:2] == (200, {"bytes": 600})
        slow.close()
        await eventually(lambda: app[reading_key].count == 0)
        assert (await ask(2000))[:2] == (200, {"bytes": 2000})
        assert (await ask(2001))[0] == 413
        assert app[reading_key].count == 0
    finally:
        await runner.cleanup()
