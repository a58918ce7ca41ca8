"""Handlers of /v1/chat/completions and /v1/completions: body to prompt, tokens to text, complete or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType

from aiohttp import web
from msgspec import structs

from common.errors import InvalidRequest
from common.messages.generation import ThinkingLimit
from common.observability.logs import Log
from router.answers.answer_form import AnswerForm, ShowChat, ShowCompletion
from router.answers.answer_stream import Answering
from router.answers.chat_answer import ChatAnswer, assistant_text
from router.answers.choices import AnswerOptions, Choice, ChoiceMaker, Prompt, prompt_lengths
from router.answers.details import with_details
from router.answers.openai_form import OpenAiForm
from router.answers.openai_responses import (
    CHAT_ID,
    COMPLETION_ID,
    CompletionFormat,
    Usage,
)
from router.answers.prompt_pieces import EchoFormat
from router.apis.renamed_fields import renamed_refusal
from router.auth.gates import quota_claim_key
from router.dispatch.answer_states import AnswerStates
from router.dispatch.generation import Generator, PromptBatch
from router.http.client import client_key
from router.http.errors import request_id_key, use_request_id
from router.http.request_body import Received, received
from router.images.loader import ImageLoader
from router.process.turns import Turns
from router.requests.chat_rules import check_chat
from router.requests.checks import (
    ServedModel,
    check_logprobs,
    check_prompt,
    check_request,
)
from router.requests.choice_count import choice_count
from router.requests.hidden_states import StateMemory
from router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    SharedFields,
    TokenIds,
    prompt_names,
    prompts,
    with_packed_ids,
)
from router.requests.prompt_length import PromptLength, prompt_length
from router.requests.read_constraint import read_constraint
from router.requests.thinking_budget import REASONING_FIELDS, limit_reasoning
from router.routes.listed_ids import listed_ids
from router.text.chat_prompts import ChatPrompts
from router.text.service import TextService
from router.text.token_rules import token_rules
from router.tokens.names import IdNames, TokenNames
from router.tokens.tokenizer import Tokenizer

NOTHING_HELD = nullcontext()


@dataclass(frozen=True, slots=True)
class OwnFields:
    """The fields of each prompt of a completions request whose prompts are answered differently."""

    bodies: Sequence[CompletionRequest]  # one for each prompt, without it
    names: Callable[[int], Mapping[str, str]]  # of the fields of one prompt in refusals


class RequestCounter:
    """Counts requests: `with active:` around each of them. A draining router waits until `count` is 0."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.count -= 1


class OpenAiRoutes:
    """The handlers. They ask for `model` at each request, because the nodes determine the context length."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        texts: TextService,
        model: Callable[[], ServedModel],
        images: ImageLoader,
        max_requests: int,
        log: Log,
    ) -> None:
        """`model` raises Unavailable while no requests are accepted.

        `max_requests`: prompts in flight, of all clients.
        """
        self._tokenizer = tokenizer
        self._maker = ChoiceMaker(tokenizer)
        self._texts = texts
        self._model = model
        self._images = images
        self._prompts = ChatPrompts(texts, images)
        self._max_requests = max_requests
        self._answering = Answering(generator, log)
        self._states = StateMemory()
        self._turns = Turns()  # spreads the start of requests over turns of the event loop
        self._active = RequestCounter()

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)

    async def turn(self) -> None:
        """Wait until this request may start: many requests that arrive together start in several turns of the loop."""
        await self._turns.wait()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if not self._turns.passes():
            await self._turns.wait()
        async with received(request) as memory:
            return await self.answer_chat(request, await self._texts.read_chat(memory.take()), memory)

    async def answer_chat(
        self, request: web.Request, body: ChatRequest, memory: Received, show: ShowChat = OpenAiForm
    ) -> web.StreamResponse:
        """Answer a chat. `show` makes the form of the answer for an API other than OpenAI's chat completions."""
        model = self._model()
        with self._active:
            return await self._chat(request, body, model, memory, show)

    async def _chat(
        self, request: web.Request, body: ChatRequest, model: ServedModel, memory: Received, show: ShowChat
    ) -> web.StreamResponse:
        if isinstance(body.rid, list):
            raise InvalidRequest("rid lists ids, but a chat has one: send a string", param="rid")
        if body.rid is not None or body.request_id is not None:
            use_request_id(request, body.rid, body.request_id)
        check_request(body, model)
        chat = check_chat(body, model.answers)
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        top = check_logprobs(body.top_logprobs or 0, "top_logprobs")
        logprobs = top if body.logprobs else None
        max_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        client = request[client_key]
        length = prompt_length(body, model.max_model_len, max_field)
        rendered = await self._prompts.render(body, chat, model, client, length)
        memory.release()
        prompt = rendered.tokens
        check_prompt(prompt, model, "messages" if body.input_ids is None else "input_ids")
        answer = ChatAnswer(chat, model.answers, prompt, self._tokenizer)
        grammar = await self._texts.grammar(answer.constraint(read_constraint(body)), model)
        rules = await token_rules(body, model, self._texts)
        options = AnswerOptions(max_field, logprobs, grammar, rules, answer.kept)
        asked = Prompt(prompt, images=rendered.placed, thinking=answer.thinking_limit())
        choices = self._maker.make(request, body, model, options, asked, PromptBatch())
        identity = CHAT_ID + request[request_id_key]
        named = body.logprob_token_ids or ()
        head = (identity, model.name, int(time.time()), self._names(body), logprobs, named)
        form = answer.format(head, len(choices))
        if body.echo:
            form.echoed = assistant_text(body.messages[-1])
        ids = [prompt] * len(choices)
        shown = with_details(show(form, prompt_lengths(choices)), form, body, ids, self._tokenizer)
        with self._images.hold(rendered.images) if rendered.images else NOTHING_HELD:
            return await self._answer(request, body, shown, choices)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if not self._turns.passes():
            await self._turns.wait()
        async with received(request) as memory:
            model = self._model()
            with self._active:
                read = self._texts.read_completion(memory.take(), model.max_model_len)
                return await self._complete(request, await read, model, memory, OpenAiForm)

    async def answer_completion(
        self,
        request: web.Request,
        body: CompletionRequest,
        memory: Received,
        show: ShowCompletion,
        own: OwnFields | None = None,
        identities: Sequence[str] = (),
    ) -> web.StreamResponse:
        """Answer prompts of an API other than OpenAI's completions.

        Args:
            show: makes the form of the answer.
            own: the fields of each prompt, if they differ.
            identities: the id of each prompt, if they have ids of their own.
        """
        model = self._model()
        with self._active:
            return await self._complete(request, body, model, memory, show, own, identities)

    async def _complete(
        self,
        request: web.Request,
        body: CompletionRequest,
        model: ServedModel,
        memory: Received,
        show: ShowCompletion,
        own: OwnFields | None = None,
        identities: Sequence[str] = (),
    ) -> web.StreamResponse:
        rid = body.rid
        if isinstance(rid, list):
            identities, rid = listed_ids(rid), None
        if rid is not None or body.request_id is not None:
            use_request_id(request, rid, body.request_id)
        check_request(body, model)
        logprobs = check_logprobs(body.logprobs, "logprobs")
        choices, batch = list[Choice](), PromptBatch()
        body = with_packed_ids(body)
        given = prompts(body, model.max_model_len)
        if identities and len(identities) != len(given):
            raise InvalidRequest(
                f"rid lists {len(identities)} ids, but there are {len(given)} prompts; send one for each, or a string "
                "for the request",
                param="rid",
            )
        answers = len(given) * choice_count(body)
        if answers > self._max_requests:
            raise InvalidRequest(
                f"{answers} answers in one request; this router allows {self._max_requests} in flight; send the "
                "prompts in several requests",
                param="prompt",
            )
        length = prompt_length(body, model.max_model_len)
        if own is not None:
            # What all prompts have to meet; each is checked with its own fields below.
            least = min(each.min_answer_tokens for each in own.bodies)
            length = structs.replace(length, min_answer_tokens=least)
        encoded = await self._encoded(given, body, length)
        memory.release()
        options: AnswerOptions | None = None
        limit: ThinkingLimit | None = None
        # Prompts have the same options, unless their fields differ or their texts may open the reasoning.
        alike = own is None and REASONING_FIELDS.values(body) == REASONING_FIELDS.nulls
        for index, (name, ids) in enumerate(encoded.items()):
            fields = body if own is None else own.bodies[index]
            least = (length if own is None else fields).min_answer_tokens
            check_prompt(ids, model, name, least)
            text = prompt if isinstance(prompt := given[index], str) else None
            if text is not None and fields.echo and length.may_have_cut(ids):
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
            try:
                if options is None or not alike:
                    options, limit = await self._options(fields, model, ids, logprobs, least)
                own_id = identities[index] if identities else None
                asked = Prompt(ids, index, text=text, thinking=limit, identity=own_id)
                choices += self._maker.make(request, fields, model, options, asked, batch)
            except InvalidRequest as error:
                if own is None:
                    raise
                raise renamed_refusal(error, own.names(index)) from error
            if len(encoded) > 1:
                # Other requests run between many prompts.
                await asyncio.sleep(0)
        identity = COMPLETION_ID + request[request_id_key]
        kind = EchoFormat if body.echo else CompletionFormat
        named = body.logprob_token_ids or ()
        form = kind(identity, model.name, int(time.time()), self._names(body), logprobs, named)
        told = [choice.request.token_ids for choice in choices]
        shown = with_details(show(form, told), form, body, told, self._tokenizer)
        return await self._answer(request, body, shown, choices)

    async def _options(
        self, fields: CompletionRequest, model: ServedModel, ids: TokenIds, logprobs: int | None, least: int
    ) -> tuple[AnswerOptions, ThinkingLimit | None]:
        """Return the options of the answers to a prompt, and the limit of their reasoning.

        `fields`: of this prompt; `least`: tokens that an answer needs.
        """
        constraint, limit = read_constraint(fields), None
        if REASONING_FIELDS.values(fields) != REASONING_FIELDS.nulls:
            constraint, limit = limit_reasoning(fields, constraint, model.answers, ids)
        grammar = await self._texts.grammar(constraint, model)
        rules = await token_rules(fields, model, self._texts)
        return AnswerOptions("max_tokens", logprobs, grammar, rules, min_answer_tokens=least), limit

    @property
    def active(self) -> int:
        """Requests in progress, from reading their texts and images to the end of the answer."""
        return self._active.count

    async def _encoded(
        self, given: Sequence[str | TokenIds], body: CompletionRequest, length: PromptLength
    ) -> dict[str, TokenIds]:
        """Map the name of each prompt to its token ids. All texts of the request are encoded together."""
        if len(given) == 1 and not isinstance(given[0], str):
            return {"prompt": length.cut(given[0])}
        names = prompt_names(len(given))
        texts = {name: prompt for name, prompt in zip(names, given) if isinstance(prompt, str)}
        if not texts:
            return {name: length.cut(ids) for name, ids in zip(names, given) if not isinstance(ids, str)}
        special = body.add_special_tokens is not False
        encoded = await self._texts.encode(list(texts.values()), special, length, list(texts))
        ids = dict(zip(texts, encoded))
        return {
            name: ids[name] if isinstance(prompt, str) else length.cut(prompt)
            for name, prompt in zip(names, given)
        }

    def _names(self, body: SharedFields) -> TokenNames:
        return IdNames(self._tokenizer) if body.return_tokens_as_token_ids else self._tokenizer

    async def _answer(
        self, request: web.Request, body: SharedFields, form: AnswerForm, choices: Sequence[Choice]
    ) -> web.StreamResponse:
        usage, states = Usage(), list[AnswerStates]()
        for choice in choices:
            asked = choice.request
            if asked.share.counted:
                usage.prompt_tokens += len(asked.token_ids)
                if asked.images:
                    usage.image_tokens += sum(image.span.length for image in asked.images)
            if asked.states is not None:
                states.append(asked.states)
        if not states:
            return await self._begun(request, body, form, choices, usage)
        with self._states.hold(states):
            return await self._begun(request, body, form, choices, usage)

    def _begun(
        self,
        request: web.Request,
        body: SharedFields,
        form: AnswerForm,
        choices: Sequence[Choice],
        usage: Usage,
    ) -> Awaitable[web.StreamResponse]:
        request[quota_claim_key].begin(len(choices), usage)
        if body.stream:
            return self._answering.stream(request, body, form, choices, usage)
        return self._answering.collect(request, form, choices, usage)
