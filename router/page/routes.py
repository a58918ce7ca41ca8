"""Handlers of the page at / and of its files. They are the same for everyone; the data needs the rights of the API."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

STATIC = Path(__file__).parent / "static"
FILES = "/page/{name}"
# Nothing from another host, no inline script and no inline style: text of a model can only ever be text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True, slots=True)
class _StaticFile:
    body: bytes
    content_type: str
    etag: str


class PageRoutes:
    """The handlers. All files are read once; requests name them, not paths of the file system."""

    def __init__(self) -> None:
        self._files = {path.name: _read(path) for path in sorted(STATIC.iterdir())}

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self.index)
        app.router.add_get(FILES, self.file)

    async def index(self, request: web.Request) -> web.Response:
        return self._answer(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        """Answer with a file, or 304 if the client has it. Raises HTTPNotFound."""
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound
        headers = {
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
            "ETag": file.etag,
        }
        if request.headers.get("If-None-Match") == file.etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)


def _read(path: Path) -> _StaticFile:
    body = path.read_bytes()
    return _StaticFile(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
