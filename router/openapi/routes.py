"""Handlers of /openapi.json and /docs."""

from __future__ import annotations

import msgspec
from aiohttp import web

from router.http.json_answer import send_json
from router.openapi.document import openapi_document
from router.openapi.page import docs_page

# The page needs its own style only: nothing from another host, and no script.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


class OpenApiRoutes:
    """The handlers. What they answer is made once."""

    def __init__(self, version: str) -> None:
        document = openapi_document(version)
        self._document = msgspec.json.encode(document)
        self._page = docs_page(document)

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/openapi.json", self.document)
        app.router.add_get("/docs", self.page)

    async def document(self, request: web.Request) -> web.StreamResponse:
        return await send_json(request, [self._document])

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers={"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"},
        )
