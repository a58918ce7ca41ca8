"""The base of the handlers of APIs whose requests are translated to chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import ChatTask, TaskReader
from router.http.client import client_key
from router.http.errors import json_response
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.routes.openai import OpenAiRoutes
from router.text.chat_prompts import ChatPrompts
from router.text.service import TextService


class TranslatedRoutes:
    """Holds what these handlers need, and counts the tokens of prompts."""

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

    async def count(
        self,
        request: web.Request,
        reader: TaskReader[ChatTask],
        names: Mapping[str, str],
        answer: Callable[[int], msgspec.Struct],
    ) -> web.Response:
        """Answer with the number of tokens of a prompt, which may exceed the context.

        Args:
            names: of fields of the chat, as the client knows them.
            answer: makes the answer of the number.
        """
        await self._openai.turn()
        async with received(request) as memory:
            with renamed_fields(names):
                task = await self._texts.read_task(reader, memory.take())
                with renamed_fields(task.places):
                    found = await self._prompts.count(task.chat, self._model(), request[client_key])
                return json_response(answer(found))
