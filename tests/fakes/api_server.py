"""The part of Kubernetes' API server that lists and watches EndpointSlices, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.fakes.waiting import PATIENCE

PATH = "/apis/discovery.k8s.io/v1/namespaces/tandem/endpointslices"
SELECTOR = "kubernetes.io/service-name=tandem-router"
END = b""  # as an event: the server ends the watch


def slice_of(name: str, *endpoints: dict[str, Any], version: int = 1, kind: str = "IPv4") -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": [{"name": "control", "port": 5600, "protocol": "TCP"}],
    }


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"addresses": [address], "conditions": conditions}
    return {**entry, "targetRef": {"kind": "Pod", "uid": pod}} if pod else entry


def event(kind: str, item: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


class FakeApiServer:
    """Answers as the test says; refuses requests that a real one would refuse."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 1
        self.token = "first"
        self.body: bytes | None = None  # in place of a list
        self.watch_status = 200
        self.lists = 0
        self.watches: list[str] = []  # the resource version of each
        self.refused = 0
        self.events: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # sent to whichever watch is there

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        assert request.query["labelSelector"] == SELECTOR
        if "watch" in request.query:
            return await self._watch(request)
        self.lists += 1
        if self.body is not None:
            return web.Response(body=self.body, content_type="application/json")
        listed = {"metadata": {"resourceVersion": str(self.version)}, "items": self.slices}
        return web.json_response(listed)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["allowWatchBookmarks"] == "true"
        assert int(request.query["timeoutSeconds"]) > 0
        self.watches.append(request.query["resourceVersion"])
        if self.watch_status != 200:
            return web.json_response({"kind": "Status", "code": self.watch_status}, status=self.watch_status)
        stream = web.StreamResponse()
        await stream.prepare(request)
        while request.transport is not None and not request.transport.is_closing():
            if self.events.empty():
                await asyncio.sleep(0.002)
            elif (line := self.events.get_nowait()) == END:
                break
            else:
                await stream.write(line)
        return stream


@contextmanager
def running(server: FakeApiServer) -> Iterator[str]:
    """Serve until the context ends; yield the URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    app = web.Application()
    app.router.add_get(PATH, server.answer)
    test_server = TestServer(app)
    asyncio.run_coroutine_threadsafe(test_server.start_server(), loop).result(PATIENCE)
    try:
        yield str(test_server.make_url("")).rstrip("/")
    finally:
        asyncio.run_coroutine_threadsafe(_close(test_server), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


async def _close(server: TestServer) -> None:
    """Close a server whose clients have gone. Connections are accepted and transports closed in turns of their own."""
    await asyncio.sleep(0.02)
    await server.close()
    await asyncio.sleep(0.01)
