"""The handler of /v1/messages."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from router.apis.messages_answer import MessagesForm
from router.apis.messages_errors import MESSAGES
from router.apis.messages_request import NAMES
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import MESSAGES as READER
from router.http_errors import request_id_key
from router.openai_routes import OpenAiRoutes
from router.request_body import received
from router.text_service import TextService


class MessagesRoutes:
    """The handler: requests run as chats do, under the same limits. Errors: see messages_errors."""

    def __init__(self, openai: OpenAiRoutes, texts: TextService, model: str) -> None:
        """`model`: name of the served model, in answers."""
        self._openai = openai
        self._texts = texts
        self._model = model

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(MESSAGES, self.answer)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                task = await self._texts.read_task(READER, memory.take())
                show = partial(MessagesForm, request[request_id_key], self._model)
                return await self._openai.answer_chat(request, task.chat, memory, show)
