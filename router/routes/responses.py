"""The handlers of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from router.apis.renamed_fields import renamed_fields
from router.apis.responses_answer import InputTokens, ResponsesForm
from router.apis.responses_request import NAMES
from router.apis.tasks import RESPONSES as READER
from router.http.errors import request_id_key, use_request_id
from router.http.request_body import received
from router.routes.translated import TranslatedRoutes

RESPONSES = "/v1/responses"


class ResponsesRoutes(TranslatedRoutes):
    """The handlers: requests run as chats do, under the same limits."""

    def add_to(self, app: web.Application) -> None:
        app.router.add_post(RESPONSES, self.respond)
        app.router.add_post(RESPONSES + "/input_tokens", self.count_tokens)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(NAMES):
                task = await self._texts.read_task(READER, memory.take())
                use_request_id(request, None, task.chat.request_id)
                show = partial(ResponsesForm, task, request[request_id_key], self._model().name)
                with renamed_fields(task.places):
                    return await self._openai.answer_chat(request, task.chat, memory, show)

    async def count_tokens(self, request: web.Request) -> web.Response:
        return await self.count(request, READER, NAMES, InputTokens)
