"""Error texts for paths and methods that are not served, with a suggestion of what the client may have meant."""

from __future__ import annotations

from aiohttp import web

MAX_PATH = 200  # characters of the path in an error text
PREFIX = "/v1"


def not_found(request: web.Request) -> str:
    """The text of a 404 for a path that no handler serves."""
    asked = f"there is no route {request.method} {_shown(request.path)}"
    path = request.path.rstrip("/")
    without = path.removeprefix(PREFIX)
    meant = next((each for each in (PREFIX + path, path, without) if _is_served(request.app, each)), None)
    if meant is None:
        return asked
    hint = f"{asked}; did you mean {_shown(meant)}?"
    if meant == PREFIX + path:
        hint += f" The base URL of OpenAI's clients ends with {PREFIX}"
    return hint


def not_allowed(request: web.Request, allowed: str) -> str:
    """The text of a 405. `allowed` lists the methods as in the Allow header."""
    return f"{_shown(request.path)} accepts {allowed}, not {request.method}"


def _shown(path: str) -> str:
    return path if len(path) <= MAX_PATH else path[:MAX_PATH] + "..."


def _is_served(app: web.Application, path: str) -> bool:
    for resource in app.router.resources():
        info = resource.get_info()
        pattern = info.get("pattern")
        if info.get("path") == path or (pattern is not None and pattern.fullmatch(path)):
            return True
    return False
