"""Operator actions of the admin listener: stop taking new requests (/drain) and start again (/resume)."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from router.http.errors import json_response


class AdminRoutes:
    """Routes that pause and resume the router.

    While it is paused, new requests are refused and /ready answers 503; requests in flight finish.
    """

    def __init__(self, set_paused: Callable[[bool], None], active: Callable[[], int]) -> None:
        self._set_paused = set_paused
        self._active = active

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/drain", self.drain)
        app.router.add_post("/resume", self.resume)

    async def drain(self, request: web.Request) -> web.Response:
        self._set_paused(True)
        return json_response({"status": "draining", "active_requests": self._active()})

    async def resume(self, request: web.Request) -> web.Response:
        self._set_paused(False)
        return json_response({"status": "serving", "active_requests": self._active()})
