"""The handler of SGLang's /generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from router.answers.choices import Prompt, choice_ids
from router.answers.openai_responses import CompletionFormat
from router.apis.generate_answer import GenerateForm
from router.apis.generate_request import GenerateTask, names_of, sampling_names
from router.apis.renamed_fields import renamed_fields
from router.apis.tasks import GENERATE
from router.http.errors import request_id_key, use_request_id
from router.http.request_body import received
from router.requests.checks import ServedModel
from router.routes.listed_ids import listed_ids
from router.routes.openai import OpenAiRoutes, OwnFields
from router.text.service import TextService
from router.tokens.tokenizer import Tokenizer


class GenerateRoutes:
    """The handler: prompts run as completions do, under the same limits."""

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

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await self._openai.turn()
        async with received(request) as memory:
            task = await self._texts.read_task(GENERATE, memory.take())
            use_request_id(request, task.rid)
            identities = listed_ids(task.rids)
            show = partial(self._form, task, request[request_id_key], identities)
            own = OwnFields(task.own, sampling_names) if task.own else None
            with renamed_fields(names_of(task)):
                return await self._openai.answer_completion(
                    request, task.completion, memory, show, own, identities
                )

    def _form(
        self,
        task: GenerateTask,
        request_id: str,
        identities: Sequence[str],
        _: CompletionFormat,
        prompts: Sequence[Sequence[int]],
    ) -> GenerateForm:
        """`prompts`: of each choice."""
        asked = [Prompt((), index, identity=each) for index, each in enumerate(identities or [None])]
        count = len(prompts) // len(asked)
        ids = [own for prompt in asked for own, *_ in choice_ids(request_id, prompt, count)]
        return GenerateForm(task, ids, self._tokenizer, prompts, self._model().answers)
