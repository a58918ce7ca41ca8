"""Finds the handler of a request whose path equals that of a route, without aiohttp's search.

For each request, aiohttp resolves the path, makes a match, and calls the middlewares through wrappers. For a path
without variables the result is always the same, so it is made once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from router.http.matched_route import PlainMatch

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PlainRoutes:
    """The routes of an application without variables in their paths. Requests for others go to the application."""

    def __init__(self, app: web.Application) -> None:
        """`app` is frozen, has no subapplications, and its middlewares do not change."""
        self.otherwise: Handler = app._handle
        self._known: dict[tuple[str, str], tuple[PlainMatch, Handler]] = {}
        for resource in app.router.resources():
            if isinstance(resource, web.PlainResource):
                for route in resource:
                    path = resource.canonical
                    match = PlainMatch(app, route, path)
                    self._known[route.method, path] = match, _wrapped(app, route.handler)

    def handler(self, request: web.Request) -> Handler:
        """Return what answers the request, its middlewares included."""
        # As the client wrote it: what needs decoding, or has a query, is left to aiohttp.
        known = self._known.get((request.method, request._message.path))
        if known is None:
            return self.otherwise
        request._match_info, handler = known
        return handler


def _wrapped(app: web.Application, handler: Handler) -> Handler:
    """Return a handler inside the middlewares of the application; the first middleware is the outermost one."""
    for middleware in reversed(app.middlewares):
        handler = partial(middleware, handler=handler)
    return handler
