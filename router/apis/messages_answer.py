"""Answers of /v1/messages: one JSON object, or a stream of events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from common.messages.generation import FINISH_LENGTH, FINISH_STOP
from router.answers.answer_form import AnswerForm
from router.answers.openai_responses import AnswerPiece, ChatFormat, Usage
from router.apis.answer_items import Added, AnswerItems, Change, Item, ItemKind, Opened
from router.http.messages_errors import messages_error

MESSAGE_ID = "msg_"  # prefix of an answer's id; the request id follows
FINISH_CALLS = "tool_calls"
_encode = msgspec.json.Encoder().encode
_REASONS = {FINISH_STOP: "end_turn", FINISH_LENGTH: "max_tokens", FINISH_CALLS: "tool_use"}


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesForm(AnswerForm):
    """An `AnswerForm`, and the collector of its own complete answers."""

    def __init__(self, identity: str, model: str, form: ChatFormat, prompt_tokens: Sequence[int]) -> None:
        """`identity`: the id of the request; `form` parses the text."""
        self._identity = identity
        self._model = model
        self._prompt_tokens = prompt_tokens[0]
        self._items = AnswerItems(form)
        self._begun = False

    # -- a stream

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        changes = self._items.follow(piece)
        events = b""
        if not self._begun:
            # Not before the first piece, which brings the token counts.
            self._begun = True
            events = _event("message_start", message=self._message([], None))
        return events + b"".join(self._shown(change) for change in changes)

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._items.stop_string}
        return (_event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop"),)

    def failure(self, body: dict[str, Any], status: int) -> bytes:
        error = messages_error(body["error"], status, self._identity)
        return b"event: error\ndata: " + _encode(error) + b"\n\n"

    # -- a complete answer

    def collector(self, choices: int) -> MessagesForm:
        return self

    def add(self, piece: AnswerPiece) -> None:
        self._items.follow(piece)

    async def parts(self, usage: Usage) -> list[bytes]:
        return [_encode(self._message([_block(item) for item in self._items.items], self._stop_reason()))]

    def _stop_reason(self) -> str | None:
        reason = self._items.finish_reason
        if reason == FINISH_STOP and self._items.stop_string is not None:
            return "stop_sequence"
        if reason == FINISH_STOP and any(item.kind is ItemKind.CALL for item in self._items.items):
            # A chat ends with `stop` after a call that tool_choice names; this API has one reason for all calls.
            reason = FINISH_CALLS
        return None if reason is None else _REASONS.get(reason, reason)

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": MESSAGE_ID + self._identity,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._items.stop_string,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        cached = self._items.prompt_cached
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._items.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._items.reasoning_tokens},
        }

    def _shown(self, change: Change) -> bytes:
        if isinstance(change, Opened):
            return _event("content_block_start", index=change.index, content_block=_empty(change.item))
        if isinstance(change, Added):
            return _event("content_block_delta", index=change.index, delta=_delta(change.item, change.text))
        return _event("content_block_stop", index=change.index)


def _empty(item: Item) -> dict[str, Any]:
    match item.kind:
        case ItemKind.TEXT:
            return {"type": "text", "text": ""}
        case ItemKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ItemKind.CALL:
            return {"type": "tool_use", "id": item.identity, "name": item.name, "input": {}}


def _delta(item: Item, text: str) -> dict[str, Any]:
    match item.kind:
        case ItemKind.TEXT:
            return {"type": "text_delta", "text": text}
        case ItemKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case ItemKind.CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _block(item: Item) -> dict[str, Any]:
    match item.kind:
        case ItemKind.TEXT:
            return {"type": "text", "text": item.text}
        case ItemKind.REASONING:
            return {"type": "thinking", "thinking": item.text, "signature": ""}
        case ItemKind.CALL:
            return _empty(item) | {"input": _arguments(item.text)}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; {} where an answer that was cut off leaves no whole object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return {}


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
