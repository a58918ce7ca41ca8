"""The handler of vLLM's /inference/v1/generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from router.answers.details import PromptScoreList
from router.answers.openai_responses import ChatFormat, CompletionFormat
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import TOKENS
from router.apis.tokens_answer import TokensForm
from router.apis.tokens_request import TOKENS_NAMES, PromptOfTokens
from router.http.errors import request_id_key
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.routes.openai import OpenAiRoutes
from router.text.service import TextService
from router.tokens.names import IdNames
from router.tokens.tokenizer import Tokenizer


class TokensRoutes:
    """The handler: a prompt runs as one of completions does, under the same limits."""

    def __init__(
        self,
        openai: OpenAiRoutes,
        texts: TextService,
        tokenizer: Tokenizer,
        model: Callable[[], ServedModel],
    ) -> None:
        """`model` raises Unavailable while no requests are accepted."""
        self._openai = openai
        self._texts = texts
        self._tokenizer = tokenizer
        self._model = model

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/inference/v1/generate", self.generate)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            task = await self._texts.read_task(TOKENS, memory.take())
            show = partial(self._form, task.completion, request)
            with renamed_fields(TOKENS_NAMES):
                return await self._openai.answer_completion(request, task.completion, memory, show)

    def _form(
        self,
        body: PromptOfTokens,
        request: web.Request,
        _: CompletionFormat,
        prompts: Sequence[Sequence[int]],
    ) -> TokensForm:
        """`prompts`: of each choice."""
        name, created = self._model().name, int(time.time())
        named = body.logprob_token_ids or ()
        form = ChatFormat("", name, created, IdNames(self._tokenizer), body.logprobs, named)
        scores = None
        if body.prompt_logprobs is not None:
            scores = PromptScoreList(prompts[0], body.prompt_logprobs, self._tokenizer)
        return TokensForm(request[request_id_key], form, scores, {"model": name, "created": created})
