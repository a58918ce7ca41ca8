"""Routes that are found without aiohttp's search answer as those that are."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from router.http.matched_route import PlainMatch, matched_route
from router.server.http_server import http_runner
from tests.fakes.waiting import PATIENCE


async def ask(request: str) -> tuple[str, str]:
    """Send the first line of a request; return the status line and what the innermost handler has seen."""

    @web.middleware
    async def outer(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        response.headers["Seen"] = f"outer {response.headers.get('Seen', '')}"
        return response

    @web.middleware
    async def inner(request: web.Request, handler: Handler) -> web.StreamResponse:
        plain = isinstance(request.match_info, PlainMatch)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status)
        response.headers["Seen"] = f"inner {matched_route(request)} plain={plain}"
        return response

    async def handle(request: web.Request) -> web.Response:
        assert request.app is app
        assert dict(request.match_info) in ({}, {"id": "1"})
        return web.Response()

    app = web.Application(middlewares=[outer, inner])
    app.router.add_get("/a", handle)
    app.router.add_post("/a", handle)
    app.router.add_get("/b/{id}", handle)
    runner = http_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(f"{request}\r\nHost: x\r\n\r\n".encode())
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)).decode()
        writer.close()
    finally:
        await runner.cleanup()
    status, *lines = head.split("\r\n")
    return status.split(" ", 1)[1], dict(line.split(": ", 1) for line in lines if line).get("Seen", "")


@pytest.mark.parametrize(
    ("request_line", "status", "seen"),
    [
        ("GET /a HTTP/1.1", "200 OK", "/a plain=True"),
        ("POST /a HTTP/1.1", "200 OK", "/a plain=True"),
        ("HEAD /a HTTP/1.1", "200 OK", "/a plain=True"),
        ("GET /a HTTP/1.1\r\nExpect: 100-continue", "100 Continue", ""),
        ("GET /a?x=1 HTTP/1.1", "200 OK", "/a plain=False"),
        ("GET /%61 HTTP/1.1", "200 OK", "/a plain=False"),
        ("GET /b/1 HTTP/1.1", "200 OK", "/b/{id} plain=False"),
        ("PUT /a HTTP/1.1", "405 Method Not Allowed", " plain=False"),
        ("GET /A HTTP/1.1", "404 Not Found", " plain=False"),
    ],
)
async def test_every_request_reaches_its_handler_through_the_middlewares(
    request_line: str, status: str, seen: str
) -> None:
    found, said = await ask(request_line)
    assert found == status
    if seen:
        assert said == f"outer inner {seen}"
