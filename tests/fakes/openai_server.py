"""An OpenAI-compatible server with scripted streams, for tests of clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

DONE = "[DONE]"
Event = dict[str, Any] | str


def token(text: str) -> dict[str, Any]:
    """Return an event of a text completion with one token."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}]}


def finish(tokens: int) -> list[dict[str, Any]]:
    """Return the last events of a text completion: its end and its usage."""
    return [
        {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}},
    ]


@dataclass
class OpenAiServer:
    """Streams `events` to every completion. `asked` lists the bodies of requests, `keys` their authorization.

    A lone surrogate in an event that is a text is sent as the byte that it stands for.
    """

    events: Sequence[Event] = ()
    status: int = 200
    hold: int = 0  # answer nobody until this many requests have arrived
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        while len(self.asked) < self.hold:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        self.at_once -= 1
        if self.status != 200:
            return web.json_response({"error": {"message": "too busy"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode(errors="surrogateescape"))
        return response


@asynccontextmanager
async def serving(server: OpenAiServer) -> AsyncIterator[OpenAiServer]:
    """Serve on a free port of loopback."""
    async with TestServer(server.application()) as running:
        server.url = str(running.make_url("")).rstrip("/")
        yield server
