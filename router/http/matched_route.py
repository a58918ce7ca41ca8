"""Returns the path of the route that serves a request: gates decide by it, and metrics have it as a label."""

from __future__ import annotations

from aiohttp import web

# Routes by which orchestrators ask whether the process runs, whether it is healthy, and whether it takes requests.
LIVE = ("/live", "/liveness", "/ping")
HEALTH = ("/health", "/health_generate")
READY = ("/ready", "/readiness")
PROBES = frozenset((*LIVE, *HEALTH, *READY))


class PlainMatch(web.UrlMappingMatchInfo):
    """The match of a route without variables, shared by all of its requests."""

    def __init__(self, app: web.Application, route: web.AbstractRoute, path: str) -> None:
        super().__init__({}, route)
        self.path = path
        self.add_app(app)
        self.current_app = app
        self.freeze()


def matched_route(request: web.Request) -> str:
    """Return the path of the matched route, with its variables as names; "" if none matched."""
    match = request.match_info
    if isinstance(match, PlainMatch):
        return match.path
    resource = match.route.resource
    return "" if resource is None else resource.canonical
