"""Handlers of /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from router.http.json_answer import send_json
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.text.service import TextService


class TokenizerRoutes:
    """The handlers."""

    def __init__(self, texts: TextService, model: Callable[[], ServedModel], info: bytes) -> None:
        """`info`: the answer of /tokenizer_info."""
        self._texts = texts
        self._model = model
        self._info = info

    def add_to(self, app: web.Application) -> None:
        for prefix in ("", "/v1"):  # as in SGLang
            app.router.add_post(f"{prefix}/tokenize", self.tokenize)
            app.router.add_post(f"{prefix}/detokenize", self.detokenize)
        app.router.add_get("/tokenizer_info", self.tokenizer_info)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        async with received(request) as memory:
            answer = await self._texts.tokenize(memory.take(), self._model())
            return await send_json(request, [answer])

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        async with received(request) as memory:
            answer = await self._texts.detokenize(memory.take(), self._model())
            return await send_json(request, [answer])

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        return await send_json(request, [self._info])
