"""Text operations for the HTTP side. Small, bounded work runs in the router; everything else runs in the workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from router.apis.tasks import TaskReader
from router.grammar.constraint import Constraint
from router.grammar.known_grammars import KnownGrammars
from router.requests.chat_input import ChatInput
from router.requests.checks import ServedModel
from router.requests.field_rules import UnknownFields
from router.requests.openai_schema import ChatRequest, CompletionRequest
from router.requests.prompt_length import PromptLength
from router.templates.prompt_end import PromptEnd
from router.text.jobs import (
    CompileGrammar,
    Detokenize,
    EncodeTexts,
    Job,
    JobAnswer,
    Payload,
    ReadChat,
    ReadCompletion,
    ReadTask,
    RenderChat,
    Tokenize,
)
from router.text.work import read_chat, read_completion
from router.tokens.tokenizer import Tokenizer

T = TypeVar("T", bound=msgspec.Struct)
MAX_READ_HERE = 1 << 16  # bytes of a body: reading it takes at most 2.3 ms
# Characters of all texts of a request: encoding them is faster than a worker's round trip.
MAX_ENCODED_HERE = 2048
_chat = msgspec.msgpack.Decoder(ChatRequest)
_completion = msgspec.msgpack.Decoder(CompletionRequest)


class Workers(Protocol):
    """Runs jobs: a TextPool, or in tests the same work in this process."""

    async def run(self, job: Job, payload: Payload) -> JobAnswer: ...


class TextService:
    """Parses bodies and tokenizes messages and texts. Refusals do not depend on where the work runs."""

    def __init__(self, workers: Workers, tokenizer: Tokenizer, unknown: UnknownFields) -> None:
        """`unknown`: what to do about unknown fields."""
        self._workers = workers
        self._tokenizer = tokenizer
        self._unknown = unknown
        self._grammars = KnownGrammars()

    async def read_chat(self, raw: bytearray) -> ChatRequest:
        """Parse a chat body. Raises InvalidRequest, which names the field."""
        if len(raw) <= MAX_READ_HERE:
            request, unknown = read_chat(raw)
            self._unknown.check(unknown)
            return request
        return _chat.decode(await self._run(ReadChat(), raw))

    async def read_completion(self, raw: bytearray, max_model_len: int) -> CompletionRequest:
        """Parse a completion body.

        Token ids of a large body arrive packed, and at most as many as the context holds.
        """
        if len(raw) <= MAX_READ_HERE:
            request, unknown = read_completion(raw)
            if unknown:
                self._unknown.check(unknown)
            return request
        return _completion.decode(await self._run(ReadCompletion(max_model_len), raw))

    async def read_task(self, reader: TaskReader[T], raw: bytearray) -> T:
        """Parse the body of an API that is translated. Raises InvalidRequest, which names the field."""
        if len(raw) <= MAX_READ_HERE:
            task = reader.read(raw)
            self._unknown.check(reader.unknown(raw))
            return task
        return reader.unpacked(await self._run(ReadTask(reader.api), raw))

    async def chat_prompt(
        self,
        given: ChatInput,
        add_special_tokens: bool,
        length: PromptLength,
        end: PromptEnd,
    ) -> array[int]:
        """Render and tokenize messages. Always in a worker: the cost of a template depends on its author."""
        payload = msgspec.msgpack.encode(given)
        [tokens] = await self._tokens(RenderChat(add_special_tokens, length, end), payload)
        return tokens

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, length: PromptLength, fields: Sequence[str]
    ) -> list[array[int]]:
        """Tokenize texts.

        Raises ContextTooLong with the field of a text that is too long, early if its length shows it.
        """
        for text, field in zip(texts, fields):
            length.check(self._tokenizer.least_tokens(text), field, exact=False)
        if sum(map(len, texts)) <= MAX_ENCODED_HERE:
            encode = self._tokenizer.encode
            return [array("i", length.cut(encode(text, add_special_tokens))) for text in texts]
        job = EncodeTexts(add_special_tokens, length, tuple(fields))
        return await self._tokens(job, msgspec.msgpack.encode(texts))

    async def tokenize(self, raw: bytearray, model: ServedModel) -> Payload:
        """Return the JSON response of /tokenize."""
        variables = tuple(model.answers.template_variables)
        job = Tokenize(model.names, model.max_model_len, variables, model.answers.call_support)
        return await self._run(job, raw)

    async def detokenize(self, raw: bytearray, model: ServedModel) -> Payload:
        """Return the JSON response of /detokenize."""
        return await self._run(Detokenize(model.names, model.vocab_size), raw)

    async def grammar(self, constraint: Constraint | None, model: ServedModel) -> str:
        """Return the grammar of a constraint, which compiles on the nodes; "" without one.

        Always in a worker, except for constraints of recent requests. Raises InvalidGrammar with the field.
        """
        if constraint is None:
            return ""
        payload = msgspec.msgpack.encode(constraint)
        known = self._grammars.get(payload)
        if known is None:
            job = CompileGrammar(model.vocab_size, model.eos_token_ids, constraint.field)
            known = (await self._run(job, payload)).decode()
            self._grammars.add(payload, known)
        return known

    async def _tokens(self, job: Job, payload: bytes) -> list[array[int]]:
        answer, packed = await self._workers.run(job, payload)
        answer.check()
        tokens = array("i")
        tokens.frombytes(packed)
        found, start = [], 0
        for count in answer.counts:
            found.append(tokens[start : start + count])
            start += count
        return found

    async def _run(self, job: Job, payload: Payload) -> Payload:
        answer, result = await self._workers.run(job, payload)
        answer.check()
        self._unknown.check(answer.unknown_fields)
        return result
