"""/v1/chat/completions and /v1/completions: body to prompt, tokens to text, complete or as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from common.errors import InternalError, InvalidRequest, RequestError
from common.observability.logs import Log
from router.chat_template import ChatTemplate
from router.generation import GenerationRequest, Generator
from router.http_errors import REQUEST_ID, body_of, invalid_body, json_response, request_id_key
from router.openai_responses import ChatFormat, CompletionFormat, Format, Piece, Usage
from router.openai_schema import ChatRequest, CompletionRequest, SharedFields, prompts, refuse_unsupported
from router.request_checks import (
    ServedModel,
    check_logprobs,
    check_model,
    check_prompt,
    sampling_params,
    stop_strings,
)
from router.text_stream import TextStream
from router.tokenizer import Tokenizer

WRITE_TIMEOUT = 30.0  # seconds that a reader may leave its socket full before it is dropped
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_encode = msgspec.json.Encoder().encode
T = TypeVar("T", bound=SharedFields)


@dataclass(frozen=True, slots=True)
class Choice:
    """One prompt of a request, ready to run."""

    request: GenerationRequest
    text: TextStream


class OpenAiRoutes:
    """Handlers; `model` is asked anew for each request, since nodes decide the context length."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        model: Callable[[], ServedModel],
        log: Log,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._template = template
        self._model = model
        self._log = log
        self._decode_chat = msgspec.json.Decoder(ChatRequest)
        self._decode_completion = msgspec.json.Decoder(CompletionRequest)

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, self._decode_chat)
        model = self._model()
        check_model(body, model)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = check_logprobs((body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
        newer = body.max_completion_tokens is not None
        limit = body.max_completion_tokens if newer else body.max_tokens
        prompt = await self._tokenizer.encode(self._template.render(body.messages), add_special_tokens=False)
        max_field = "max_completion_tokens" if newer else "max_tokens"
        choices = [self._choice(request, body, model, prompt, 0, limit, max_field, logprobs)]
        form = ChatFormat(
            f"chatcmpl-{request[request_id_key]}",
            model.name,
            int(time.time()),
            self._tokenizer,
            logprobs is not None,
        )
        return await self._answer(request, body, form, choices)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, self._decode_completion)
        model = self._model()
        check_model(body, model)
        logprobs = check_logprobs(body.logprobs, "logprobs")
        choices = []
        for index, prompt in enumerate(prompts(body)):
            ids = (
                await self._tokenizer.encode(prompt, add_special_tokens=True)
                if isinstance(prompt, str)
                else prompt
            )
            choices.append(
                self._choice(request, body, model, ids, index, body.max_tokens, "max_tokens", logprobs)
            )
        form = CompletionFormat(
            f"cmpl-{request[request_id_key]}",
            model.name,
            int(time.time()),
            self._tokenizer,
            logprobs is not None,
        )
        return await self._answer(request, body, form, choices)

    def _choice(
        self,
        request: web.Request,
        body: SharedFields,
        model: ServedModel,
        prompt: list[int],
        index: int,
        limit: int | None,
        max_field: str,
        logprobs: int | None,
    ) -> Choice:
        check_prompt(prompt, model)
        sampling = sampling_params(body, len(prompt), model, limit, max_field, logprobs)
        identity = request[request_id_key] if index == 0 else f"{request[request_id_key]}-{index}"
        decoder = self._tokenizer.stream(body.skip_special_tokens is not False)
        text = TextStream(decoder, stop_strings(body), bool(body.include_stop_str_in_output))
        return Choice(GenerationRequest(identity, prompt, sampling), text)

    async def _answer(
        self, request: web.Request, body: SharedFields, form: Format, choices: Sequence[Choice]
    ) -> web.StreamResponse:
        usage = Usage(prompt_tokens=sum(len(choice.request.token_ids) for choice in choices))
        if body.stream:
            return await self._stream(request, body, form, choices, usage)
        if body.stream_options is not None:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        collected: list[list[Piece]] = [[] for _ in choices]
        async with aclosing(self._pieces(choices, usage)) as pieces:
            async for piece in pieces:
                collected[piece.index].append(piece)
        answers = [
            form.choice(i, "".join(p.text for p in parts), parts, parts[-1].finish_reason or "")
            for i, parts in enumerate(collected)
        ]
        return json_response(form.complete(answers, usage))

    async def _stream(
        self, request: web.Request, body: SharedFields, form: Format, choices: Sequence[Choice], usage: Usage
    ) -> web.StreamResponse:
        options = body.stream_options
        every = bool(options and options.continuous_usage_stats)
        at_end = bool(options and options.include_usage)
        writer = SseWriter(request, lambda: usage.report() if every else None if at_end else ...)
        async with aclosing(self._pieces(choices, usage)) as pieces:
            try:
                first = await anext(pieces)  # an error before the first token is an ordinary HTTP error
                await writer.start()
                await writer.send([*form.opening(len(choices)), *_chunks(form, first)])
                async for piece in pieces:
                    await writer.send(_chunks(form, piece))
                if at_end:
                    await writer.send([{**form.head(form.part), "choices": [], "usage": usage.report()}])
                return await writer.finish(b"data: [DONE]\n\n")
            except RequestError as error:
                if not writer.started:
                    raise
                return await writer.finish(_event(body_of(error)))  # no [DONE]: the answer is not whole
            except (ConnectionError, TimeoutError):
                self._log.info("the client left or reads too slowly", request_id=request[request_id_key])
                writer.abandon()
                return writer.response
            except StopAsyncIteration:
                raise InternalError("a request ended without a token") from None

    async def _pieces(self, choices: Sequence[Choice], usage: Usage) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices as they come. Closing it, or an error in one choice, ends all of them."""
        if len(choices) == 1:
            async with aclosing(self._run(0, choices[0], usage)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue(maxsize=4 * len(choices))

        async def pump(index: int, choice: Choice) -> None:
            try:
                async with aclosing(self._run(index, choice, usage)) as pieces:
                    async for piece in pieces:
                        await queue.put(piece)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(i, choice)) for i, choice in enumerate(choices)]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, index: int, choice: Choice, usage: Usage) -> AsyncGenerator[Piece, None]:
        text = choice.text
        async with aclosing(self._generator.generate(choice.request)) as deltas:
            async for delta in deltas:
                usage.cached_tokens += delta.cached_tokens or 0
                offset, before = text.emitted, text.completion_tokens
                new, tokens = text.push(delta.tokens, delta.finish_reason)
                usage.completion_tokens += text.completion_tokens - before
                yield Piece(index, new, tokens, offset, text.finish_reason)
                if text.finish_reason is not None:
                    return  # a stop string: closing the generator frees the nodes


class SseWriter:
    """Server-sent events with a bound on how long a slow reader is waited for."""

    def __init__(self, request: web.Request, usage: Callable[[], Any]) -> None:
        """`usage()` is what every chunk carries as usage; Ellipsis: no such field."""
        self._request = request
        self._usage = usage
        self.response = web.StreamResponse(headers={**SSE_HEADERS, REQUEST_ID: request[request_id_key]})
        self.started = False

    async def start(self) -> None:
        self.started = True
        await self.response.prepare(self._request)

    async def send(self, chunks: Sequence[dict[str, Any]]) -> None:
        """All chunks in one write. Raises ConnectionError or TimeoutError when the reader is gone or asleep."""
        if not chunks:
            return
        usage = self._usage()
        if usage is not ...:
            chunks = [{"usage": usage, **chunk} for chunk in chunks]
        async with asyncio.timeout(WRITE_TIMEOUT):
            await self.response.write(b"".join(_event(chunk) for chunk in chunks))

    async def finish(self, last: bytes) -> web.StreamResponse:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await self.response.write(last)
            await self.response.write_eof()
        return self.response

    def abandon(self) -> None:
        """Cut the connection: the reader must not take what it has for a whole answer."""
        if self._request.transport is not None:
            self._request.transport.abort()


def _chunks(form: Format, piece: Piece) -> list[dict[str, Any]]:
    chunk = form.chunk([piece])
    chunks = [chunk] if chunk["choices"] else []
    closing = form.closing(piece) if piece.finish_reason is not None else None
    return [*chunks, closing] if closing is not None else chunks


def _event(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


async def _body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body, decoded and free of unsupported fields."""
    raw = await request.read()
    try:
        body = decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, msgspec.MsgspecError):
            raise invalid_body(error) from error
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    refuse_unsupported(body)
    return body
