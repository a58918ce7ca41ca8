"""The routes of a process's own socket by which the other router processes of its host ask it: see HostPeers.

They answer for this process only, and never ask others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from router.dispatch.running_requests import RunningRequests
from router.exchange.host_peers import ABORT, FLUSH, LATEST, LOAD, METRICS, PAUSE, TIMELINES
from router.exchange.orders import AbortOrder, PauseOrder
from router.exchange.series_text import labelled
from router.http.errors import json_response
from router.http.request_body import received
from router.requests.json_body import decode_json

T = TypeVar("T")
_abort = msgspec.json.Decoder(AbortOrder)
_pause = msgspec.json.Decoder(PauseOrder)


class HostRoutes:
    """The handlers."""

    def __init__(
        self,
        name: str,
        metrics: Callable[[str], Awaitable[tuple[bytes, str]]],
        timeline: Callable[[str], dict[str, Any] | None],
        latest: Callable[[int, str | None], list[dict[str, Any]]],
        running: RunningRequests,
        set_paused: Callable[[bool], None],
        active: Callable[[], int],
        flush: Callable[[], list[str]],
    ) -> None:
        """
        Args:
            name: of this process.
            metrics: from the header Accept, its series and their media type.
            timeline: of a request, by its id.
            latest: timelines of the last requests, how many at most and of which client.
            running: its requests.
            set_paused: lets it refuse new requests, or take them again.
            active: number of requests in progress.
            flush: tells all nodes to empty their caches and returns the names of those that it cannot reach.
        """
        self._name = name
        self._metrics = metrics
        self._timeline = timeline
        self._latest = latest
        self._running = running
        self._set_paused = set_paused
        self._active = active
        self._flush = flush

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(METRICS, self.metrics)
        app.router.add_get(LATEST, self.latest)
        app.router.add_get(TIMELINES + "{id:.+}", self.timeline)
        app.router.add_get(LOAD, self.load)
        app.router.add_post(ABORT, self.abort)
        app.router.add_post(PAUSE, self.pause)
        app.router.add_post(FLUSH, self.flush)

    async def metrics(self, request: web.Request) -> web.Response:
        series, media = await self._metrics(request.headers.get("Accept", ""))
        body = labelled(series.decode(), self._name).encode()
        return web.Response(body=body, headers={"Content-Type": media})

    async def timeline(self, request: web.Request) -> web.Response:
        found = self._timeline(request.match_info["id"])
        return web.Response(status=404) if found is None else json_response(found)

    async def latest(self, request: web.Request) -> web.Response:
        asked = request.query
        return json_response(self._latest(int(asked["limit"]), asked.get("client")))

    async def load(self, request: web.Request) -> web.Response:
        client = request.query.get("client")
        return json_response(len(self._running) if client is None else self._running.count(client))

    async def abort(self, request: web.Request) -> web.Response:
        async with received(request) as memory:
            order = decode_json(memory.take(), _abort)
        if order.client is None:
            return json_response(self._running.abort_all())
        return json_response(self._running.abort(order.client, order.ids))

    async def pause(self, request: web.Request) -> web.Response:
        async with received(request) as memory:
            self._set_paused(decode_json(memory.take(), _pause).paused)
        return json_response(self._active())

    async def flush(self, request: web.Request) -> web.Response:
        return json_response(self._flush())
