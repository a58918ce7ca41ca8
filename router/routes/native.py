"""The handlers of SGLang's /generate and of vLLM's /inference/v1/generate, whose answers have their own formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from router.answers.choices import Prompt, choice_ids
from router.answers.details import PromptScoreList
from router.answers.openai_responses import ChatFormat, CompletionFormat
from router.apis.generate_answer import GenerateForm
from router.apis.generate_request import GenerateTask, names_of, sampling_names
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import GENERATE, TOKENS
from router.apis.tokens_answer import TokensForm
from router.apis.tokens_request import TOKENS_NAMES, PromptOfTokens
from router.http.errors import request_id_key, use_request_id
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.routes.listed_ids import listed_ids
from router.routes.openai import OpenAiRoutes, OwnFields
from router.text.service import TextService
from router.tokens.names import IdNames
from router.tokens.tokenizer import Tokenizer


class NativeRoutes:
    """The handlers: prompts run as completions do, under the same limits."""

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
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/inference/v1/generate", self.generate_tokens)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            task = await self._texts.read_task(GENERATE, memory.take())
            use_request_id(request, task.rid)
            identities = listed_ids(task.rids)
            show = partial(self._generate_form, task, self._model(), request[request_id_key], identities)
            own = OwnFields(task.own, sampling_names) if task.own else None
            with renamed_fields(names_of(task)):
                return await self._openai.answer_completion(
                    request, task.completion, memory, show, own, identities
                )

    async def generate_tokens(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            task = await self._texts.read_task(TOKENS, memory.take())
            show = partial(self._tokens_form, task.completion, self._model(), request)
            with renamed_fields(TOKENS_NAMES):
                return await self._openai.answer_completion(request, task.completion, memory, show)

    def _generate_form(
        self,
        task: GenerateTask,
        model: ServedModel,
        request_id: str,
        identities: Sequence[str],
        _: CompletionFormat,
        prompts: Sequence[Sequence[int]],
    ) -> GenerateForm:
        """`prompts`: of each choice."""
        asked = [Prompt((), index, identity=each) for index, each in enumerate(identities or [None])]
        count = len(prompts) // len(asked)
        ids = [own for prompt in asked for own, *_ in choice_ids(request_id, prompt, count)]
        return GenerateForm(task, ids, self._tokenizer, prompts, model.answers)

    def _tokens_form(
        self,
        body: PromptOfTokens,
        model: ServedModel,
        request: web.Request,
        _: CompletionFormat,
        prompts: Sequence[Sequence[int]],
    ) -> TokensForm:
        """`prompts`: of each choice."""
        created, named = int(time.time()), body.logprob_token_ids or ()
        form = ChatFormat("", model.name, created, IdNames(self._tokenizer), body.logprobs, named)
        scores = None
        if body.prompt_logprobs is not None:
            scores = PromptScoreList(prompts[0], body.prompt_logprobs, self._tokenizer)
        return TokensForm(request[request_id_key], form, scores, {"model": model.name, "created": created})
