"""Operator actions of the admin listener: stop taking new requests (/drain) and start again (/resume)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from router.exchange.host_peers import HostPeers
from router.http.errors import json_response


class AdminRoutes:
    """Routes that pause and resume the router, with all its processes on this host.

    While it is paused, new requests are refused and /ready answers 503; requests in flight finish.
    """

    def __init__(
        self, set_paused: Callable[[bool], None], active: Callable[[], int], peers: HostPeers
    ) -> None:
        """`set_paused` and `active` concern this process, `peers` are the others."""
        self._set_paused = set_paused
        self._active = active
        self._peers = peers

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/drain", self.drain)
        app.router.add_post("/resume", self.resume)

    async def drain(self, request: web.Request) -> web.Response:
        return json_response({"status": "draining", "active_requests": await self._pause(True)})

    async def resume(self, request: web.Request) -> web.Response:
        return json_response({"status": "serving", "active_requests": await self._pause(False)})

    async def _pause(self, paused: bool) -> int:
        """Pause or resume all processes; return the number of requests that they still answer."""
        self._set_paused(paused)
        return self._active() + await self._peers.pause(paused)
