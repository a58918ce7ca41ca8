"""Answers of /v1/responses: one JSON object, or a stream of numbered events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from common.messages.generation import FINISH_LENGTH
from router.answers.answer_form import AnswerForm
from router.answers.openai_responses import AnswerPiece, ChatFormat, Usage
from router.apis.answer_items import Added, AnswerItems, Change, Closed, Item, ItemKind, Opened
from router.apis.responses_request import ResponsesTask
from router.dispatch.generation import FINISH_ABORT

RESPONSE_ID = "resp_"  # prefix of an answer's id; the request id follows
_encode = msgspec.json.Encoder().encode
_PREFIXES = {ItemKind.TEXT: "msg_", ItemKind.REASONING: "rs_", ItemKind.CALL: "fc_"}


class InputTokens(msgspec.Struct, frozen=True):
    """The answer of /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


class ResponsesForm(AnswerForm):
    """An `AnswerForm`, and the collector of its own complete answers."""

    def __init__(
        self, task: ResponsesTask, identity: str, model: str, form: ChatFormat, prompt_tokens: Sequence[int]
    ) -> None:
        """`identity`: the id of the request; `form` parses the text."""
        self._identity = identity
        self._prompt_tokens = prompt_tokens[0]
        self._namespaced = task.namespaced
        self._items = AnswerItems(form)
        self._number = 0  # the next event's
        self._fields = {
            "id": RESPONSE_ID + identity,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            **task.shown,
        }

    # -- a stream

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        events = b""
        if not self._number:
            # Sent with the first piece and not before it, so that all events are numbered.
            response = self._response("in_progress")
            for kind in ("response.created", "response.in_progress"):
                events += self._event(kind, response=response)
        return events + b"".join(self._shown(change) for change in self._items.follow(piece))

    def ending(self, usage: Usage, with_usage: bool) -> Iterable[bytes]:
        status = self._status()
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return (self._event(kind, response=self._response(status)),)

    def failure(self, body: dict[str, Any], status: int) -> bytes:
        code = "invalid_prompt" if status == 400 else "server_error"
        error = {"code": code, "message": body["error"]["message"]}
        return self._event("response.failed", response=self._response("failed", error))

    # -- a complete answer

    def collector(self, choices: int) -> ResponsesForm:
        return self

    def add(self, piece: AnswerPiece) -> None:
        self._items.follow(piece)

    async def parts(self, usage: Usage) -> list[bytes]:
        return [_encode(self._response(self._status()))]

    def _status(self) -> str:
        reason = self._items.finish_reason
        if reason == FINISH_ABORT:
            return "cancelled"
        return "incomplete" if reason == FINISH_LENGTH else "completed"

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        items = self._items
        over = status != "in_progress"
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        output = [
            self._item(index, item, self._item_status(index))
            for index, item in enumerate(items.items if over else ())
        ]
        total = self._prompt_tokens + items.completion_tokens
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": items.prompt_cached, "cache_write_tokens": 0},
            "output_tokens": items.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": items.reasoning_tokens},
            "total_tokens": total,
        }
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete,
            "output": output,
            "usage": usage if over else None,
        }

    def _item_status(self, index: int) -> str:
        """Return the status of an item that is over."""
        items = self._items
        return "completed" if index + 1 < len(items.items) or items.ends_whole else "incomplete"

    def _item_id(self, index: int, item: Item) -> str:
        return f"{_PREFIXES[item.kind]}{self._identity}_{index}"

    def _item(self, index: int, item: Item, status: str) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self._item_id(index, item), "status": status}
        done = status != "in_progress"
        if item.kind is ItemKind.CALL:
            arguments = item.text if done else ""
            call = {"type": "function_call", "call_id": item.identity, "arguments": arguments}
            return found | call | self._called(item)
        content = [_part(item)] if done else []
        if item.kind is ItemKind.REASONING:
            return found | {"type": "reasoning", "summary": [], "content": content}
        return found | {"type": "message", "role": "assistant", "content": content}

    def _called(self, item: Item) -> dict[str, str]:
        """Return the function of a call under the client's name, and its namespace if it has one."""
        function = self._namespaced.get(item.name)
        return {"name": item.name} if function is None else msgspec.structs.asdict(function)

    def _shown(self, change: Change) -> bytes:
        match change:
            case Opened(index, item):
                return self._begin(index, item)
            case Added(index, item, text, logprobs):
                place = self._place(index, item, logprobs)
                return self._event(f"response.{_STREAMED[item.kind]}.delta", **place, delta=text)
            case Closed(index, item):
                return self._end(index, item)

    def _place(self, index: int, item: Item, logprobs: Sequence[bytes]) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item_id(index, item), "output_index": index}
        if item.kind is not ItemKind.CALL:
            place["content_index"] = 0
        if item.kind is ItemKind.TEXT:
            place["logprobs"] = _list(logprobs)
        return place

    def _begin(self, index: int, item: Item) -> bytes:
        added = self._item(index, item, "in_progress")
        events = self._event("response.output_item.added", output_index=index, item=added)
        if item.kind is not ItemKind.CALL:
            part = _part(Item(item.kind))
            events += self._event("response.content_part.added", **self._part_place(index, item), part=part)
        return events

    def _end(self, index: int, item: Item) -> bytes:
        text = item.text
        called = item.kind is ItemKind.CALL
        named = {"arguments": text, "name": self._called(item)["name"]} if called else {"text": text}
        events = self._event(
            f"response.{_STREAMED[item.kind]}.done", **self._place(index, item, item.logprobs), **named
        )
        if item.kind is not ItemKind.CALL:
            part = _part(item)
            events += self._event("response.content_part.done", **self._part_place(index, item), part=part)
        done = self._item(index, item, self._item_status(index))
        return events + self._event("response.output_item.done", output_index=index, item=done)

    def _part_place(self, index: int, item: Item) -> dict[str, Any]:
        return {"item_id": self._item_id(index, item), "output_index": index, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), event)


_STREAMED = {
    ItemKind.TEXT: "output_text",
    ItemKind.REASONING: "reasoning_text",
    ItemKind.CALL: "function_call_arguments",
}


def _part(item: Item) -> dict[str, Any]:
    if item.kind is ItemKind.REASONING:
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": _list(item.logprobs)}


def _list(items: Sequence[bytes]) -> msgspec.Raw:
    """Return a JSON list of encoded items."""
    return msgspec.Raw(b"[%b]" % b",".join(items))
