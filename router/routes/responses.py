"""The handler of /v1/responses."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from router.apis.renamed_fields import renamed_fields
from router.apis.responses_answer import ResponsesForm
from router.apis.responses_request import NAMES
from router.apis.tasks import RESPONSES
from router.http.errors import request_id_key
from router.http.request_body import received
from router.routes.openai import OpenAiRoutes
from router.text.service import TextService


class ResponsesRoutes:
    """The handler: requests run as chats do, under the same limits."""

    def __init__(self, openai: OpenAiRoutes, texts: TextService, model: str) -> None:
        """`model`: name of the served model, in answers."""
        self._openai = openai
        self._texts = texts
        self._model = model

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/responses", self.respond)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                task = await self._texts.read_task(RESPONSES, memory.take())
                show = partial(ResponsesForm, task, request[request_id_key], self._model)
                return await self._openai.answer_chat(request, task.chat, memory, show)
