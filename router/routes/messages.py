"""The handlers of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from router.apis.messages_answer import MessagesForm, TokenCount
from router.apis.messages_request import NAMES
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import COUNT
from router.apis.tasks import MESSAGES as READER
from router.http.errors import request_id_key
from router.http.messages_errors import MESSAGES
from router.http.request_body import received
from router.routes.translated import TranslatedRoutes


class MessagesRoutes(TranslatedRoutes):
    """The handlers: requests run as chats do, under the same limits. Errors: see messages_errors."""

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(MESSAGES, self.answer)
        app.router.add_post(MESSAGES + "/count_tokens", self.count_tokens)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                task = await self._texts.read_task(READER, memory.take())
                model, chat = self._model(), task.chat
                if model.answers.think_markers is None:
                    # Clients must send a budget to switch thinking on, also for a model that does not think.
                    chat = msgspec.structs.replace(chat, thinking_token_budget=None)
                show = partial(MessagesForm, request[request_id_key], model.name)
                with renamed_fields(task.places):
                    return await self._openai.answer_chat(request, chat, memory, show)

    async def count_tokens(self, request: web.Request) -> web.Response:
        return await self.count(request, COUNT, NAMES, TokenCount)
