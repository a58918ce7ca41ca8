"""What the HTTP side asks about texts. Small work that cannot grow is done at once, everything else by the workers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.openai_schema import ChatRequest, CompletionRequest, Message
from router.request_checks import check_length
from router.text_jobs import (
    Answer,
    Detokenize,
    EncodeTexts,
    Job,
    ReadChat,
    ReadCompletion,
    RenderChat,
    Tokenize,
)
from router.text_work import Payload, read_chat, read_completion
from router.tokenizer import Tokenizer

SMALL_BODY = 1 << 16  # bytes: 2.3 ms for the worst of them
SMALL_TEXTS = 2048  # characters of all texts of a request: they encode faster than a worker answers
_chat = msgspec.msgpack.Decoder(ChatRequest)
_completion = msgspec.msgpack.Decoder(CompletionRequest)


class Workers(Protocol):
    """TextPool, or in tests the same work in this process."""

    async def run(self, job: Job, payload: Payload) -> tuple[Answer, Payload]: ...


class TextService:
    """Bodies to requests, messages and texts to token ids. Refusals are the same wherever the work is done."""

    def __init__(self, workers: Workers, tokenizer: Tokenizer) -> None:
        self._workers = workers
        self._tokenizer = tokenizer

    async def read_chat(self, raw: bytearray) -> ChatRequest:
        """Raises InvalidRequest with the field's name."""
        if len(raw) <= SMALL_BODY:
            return read_chat(raw)
        return _chat.decode(await self._run(ReadChat(), raw))

    async def read_completion(self, raw: bytearray, max_model_len: int) -> CompletionRequest:
        """As `read_chat`; the token ids of a large body come packed, and no more of them than the context holds."""
        if len(raw) <= SMALL_BODY:
            return read_completion(raw)
        return _completion.decode(await self._run(ReadCompletion(max_model_len), raw))

    async def chat_prompt(
        self, messages: Sequence[Message], add_special_tokens: bool, max_model_len: int
    ) -> list[int]:
        """The rendered prompt's token ids. Always by a worker: what a template costs depends on the model's maker."""
        payload = msgspec.msgpack.encode(messages)
        [tokens] = await self._tokens(RenderChat(add_special_tokens, max_model_len), payload)
        return tokens

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool, max_model_len: int, fields: Sequence[str]
    ) -> list[list[int]]:
        """Raises ContextTooLong with the field of a text that is too long, at once where its length shows it."""
        for text, field in zip(texts, fields):
            check_length(self._tokenizer.least_tokens(text), max_model_len, field, exact=False)
        if sum(map(len, texts)) <= SMALL_TEXTS:
            return [self._tokenizer.encode(text, add_special_tokens) for text in texts]
        job = EncodeTexts(add_special_tokens, max_model_len, tuple(fields))
        return await self._tokens(job, msgspec.msgpack.encode(texts))

    async def tokenize(self, raw: bytearray, max_model_len: int) -> Payload:
        """The JSON that answers /tokenize."""
        return await self._run(Tokenize(max_model_len), raw)

    async def detokenize(self, raw: bytearray, vocab_size: int) -> Payload:
        """The JSON that answers /detokenize."""
        return await self._run(Detokenize(vocab_size), raw)

    async def _tokens(self, job: Job, payload: bytes) -> list[list[int]]:
        answer, packed = await self._workers.run(job, payload)
        answer.check()
        tokens = array("i")
        tokens.frombytes(packed)
        found, start = [], 0
        for count in answer.counts:
            found.append(tokens[start : start + count].tolist())
            start += count
        return found

    async def _run(self, job: Job, payload: Payload) -> Payload:
        answer, result = await self._workers.run(job, payload)
        answer.check()
        return result
