"""The handlers of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from router.apis.messages_answer import MessagesForm, TokenCount
from router.apis.messages_request import NAMES
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import COUNT
from router.apis.tasks import MESSAGES as READER
from router.http.client import client_key
from router.http.errors import json_response, request_id_key
from router.http.messages_errors import MESSAGES
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.routes.openai import OpenAiRoutes
from router.text.chat_prompts import ChatPrompts
from router.text.service import TextService


class MessagesRoutes:
    """The handlers: requests run as chats do, under the same limits. Errors: see messages_errors."""

    def __init__(
        self,
        openai: OpenAiRoutes,
        texts: TextService,
        prompts: ChatPrompts,
        model: Callable[[], ServedModel],
    ) -> None:
        """`model` raises Unavailable while no requests are accepted."""
        self._openai = openai
        self._texts = texts
        self._prompts = prompts
        self._model = model

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(MESSAGES, self.answer)
        app.router.add_post(MESSAGES + "/count_tokens", self.count_tokens)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                task = await self._texts.read_task(READER, memory.take())
                show = partial(MessagesForm, request[request_id_key], self._model().name)
                return await self._openai.answer_chat(request, task.chat, memory, show)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt, which may exceed the context."""
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                body = (await self._texts.read_task(COUNT, memory.take())).chat
                found = await self._prompts.count(body, self._model(), request[client_key])
                return json_response(TokenCount(found))
