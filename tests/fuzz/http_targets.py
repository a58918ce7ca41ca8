"""Fuzz targets for what clients send, and for the event stream that goes back to them."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache, partial
from typing import Any

import msgspec

from common.checkpoint.generation_config import DefaultSampling
from common.errors import RequestError
from common.messages.generation import OutputToken, TokenLogprob
from router.answers.openai_responses import AnswerPiece, ChatFormat, CompletionFormat, Usage, usage_field
from router.apis.tasks import READERS
from router.requests.checks import ServedModel, check_name, sampling_params
from router.requests.image_parts import image_parts
from router.requests.json_body import decode_json
from router.requests.openai_schema import (
    ChatRequest,
    CompletionRequest,
    SharedFields,
    check_stops,
    compact_chat,
    compact_completion,
    prompts,
)
from router.tokens.tokenizer import Tokenizer
from tests.fuzz.file_targets import MODELS
from tests.fuzz.target import Target

MODEL = ServedModel("m", "/models/m", 0, 704, 4096, (2,), DefaultSampling())
CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


def chat_body(data: bytes) -> None:
    with suppress(RequestError):
        request = decode_json(data, CHAT)
        made = compact_chat(request)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ChatRequest) == made
        list(image_parts(request.messages))
        _check(request)


def completion_body(data: bytes) -> None:
    with suppress(RequestError):
        request = decode_json(data, COMPLETION)
        made = compact_completion(request)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=CompletionRequest) == made
        prompts(made, MODEL.max_model_len)
        _check(request)


def task_body(api: str, data: bytes) -> None:
    """A body of an API that is translated, as the router reads it and as a text worker passes it on."""
    reader = READERS[api]
    with suppress(RequestError):
        task = reader.read(data)
        reader.unknown(data)
        made = reader.unpacked(reader.packed(data))
        assert type(made) is type(task)
        _check(made.completion if api in ("generate", "tokens") else made.chat)


def _check(request: SharedFields) -> None:
    check_name(request.model, MODEL.names)
    check_stops(request)
    made = sampling_params(request, 1, MODEL, request.max_tokens, "max_tokens", None)
    assert made.fits(MODEL.vocab_size)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(MODELS / "tiny-target")


def events(data: bytes) -> None:
    """Whatever the model generates, each event is one line, and the JSON of all events holds the text."""
    text = data.decode("utf-8", "replace")
    tokens = [OutputToken(byte, TokenLogprob(-0.5, (byte,), (-0.5,))) for byte in data[:4]]
    piece = AnswerPiece(0, text, tokens, [0] * len(tokens), None)
    usage = usage_field(Usage(1, 2, 0))
    chat = ChatFormat("chatcmpl-1", text, 0, tokenizer(), 1)
    completion = CompletionFormat("cmpl-1", text, 0, tokenizer(), None)
    for made, said in (
        (chat.events(piece, usage), lambda choice: choice["delta"]["content"]),
        (completion.events(piece, usage), lambda choice: choice["text"]),
    ):
        found = _parsed(made)
        assert all(event["model"] == text for event in found)
        assert "".join(said(event["choices"][0]) for event in found) == text


def _parsed(stream: bytes) -> list[Any]:
    """Parse server-sent events as a client does: lines end with \\n, \\r\\n or \\r, an empty line ends an event."""
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    fields = [line for line in lines if line]
    assert all(line.startswith(b"data: ") for line in fields)
    assert stream.count(b"\n\n") == len(fields)
    return [json.loads(line.removeprefix(b"data: ")) for line in fields]


TARGETS = {
    "chat-body": Target(
        chat_body,
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 4, '
            b'"temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.5}, "seed": 7, "top_k": 3}',
        ),
    ),
    "completion-body": Target(
        completion_body, (b'{"prompt": [[1, 2], [3]], "max_tokens": 2, "min_tokens": 1}',)
    ),
    "generate-body": Target(
        partial(task_body, "generate"),
        (
            b'{"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2, "stop": "x", "top_k": 3}, '
            b'"return_logprob": true, "top_logprobs_num": 2, "rid": "r"}',
        ),
    ),
    "tokens-body": Target(
        partial(task_body, "tokens"),
        (
            b'{"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "stop": "x", "top_k": 3, "logprobs": 2}, '
            b'"stream": true, "stream_options": {"include_usage": true}, "request_id": "r"}',
        ),
    ),
    "responses-body": Target(
        partial(task_body, "responses"),
        (
            b'{"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": '
            b'"function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", '
            b'"call_id": "c", "output": "x"}], "instructions": "b", "max_output_tokens": 4, "tools": [{"type": '
            b'"function", "name": "f", "parameters": {"maximum": 5}}], "tool_choice": "auto"}',
        ),
    ),
    "messages-body": Target(
        partial(task_body, "messages"),
        (
            b'{"max_tokens": 4, "system": "s", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", '
            b'"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}, {"role": "user", '
            b'"content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}], "tools": [{"name": "f", '
            b'"input_schema": {"maximum": 5}}], "tool_choice": {"type": "any"}, "stop_sequences": ["x"]}',
        ),
    ),
    "events": Target(events, ("a\n\ndata: b\r\u2028\x85".encode(),)),
}
