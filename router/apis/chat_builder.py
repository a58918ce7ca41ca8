"""Builds a chat request from the pieces of a conversation in another API's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from router.requests.json_body import invalid_body
from router.requests.openai_schema import ChatRequest

ChatPart = dict[str, Any]
_WHERE = "where"  # key of a part, until the chat is built


def text_part(text: str) -> ChatPart:
    return {"type": "text", "text": text}


def image_part(url: str, where: str) -> ChatPart:
    """Return an image; `where` is the client's field that has it."""
    return {"type": "image_url", "image_url": {"url": url}, _WHERE: where}


class ChatBuilder:
    """Collects messages. What the model said before a user's or a tool's message becomes one assistant message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._read_from: list[str] = []  # per message: the client's field with its beginning
        self.reading = ""  # the client's field that the next pieces come from
        # Messages of the chat and their images -> the client's fields. Messages are joined, so their numbers differ.
        self.places: dict[str, str] = {}

    @property
    def ends_with_assistant(self) -> bool:
        """True if the last message is text of the assistant, which the answer may continue."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and "tool_calls" not in last

    def add_message(self, role: str, parts: Sequence[ChatPart]) -> None:
        """Add a message of any role but tool. System texts at the beginning are joined: templates take one."""
        only = self._messages[0] if len(self._messages) == 1 else None
        if role == "system" and only is not None and only["role"] == "system":
            only["content"] = [*only["content"], text_part("\n\n"), *parts]
        elif role == "assistant":
            self._assistant().setdefault("content", []).extend(parts)
        else:
            self._add({"role": role, "content": list(parts)})

    def add_reasoning(self, text: str) -> None:
        message = self._assistant()
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def add_call(self, identity: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Add a tool call of the model; `arguments` as JSON text or as an object."""
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        call = {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def add_result(self, identity: str, parts: Sequence[ChatPart]) -> None:
        """Add what a tool returned."""
        self._add({"role": "tool", "tool_call_id": identity, "content": list(parts)})

    def build(self, fields: dict[str, Any]) -> ChatRequest:
        """Return the request with these other fields; None leaves one out. Raises InvalidRequest."""
        given = {name: value for name, value in fields.items() if value is not None}
        messages = [_plain(message) for message in self._messages]
        if not messages:
            raise InvalidRequest(
                "nothing in messages can be read by the model; send a text", param="messages"
            )
        self.places = {f"messages[{index}]": field for index, field in enumerate(self._read_from)}
        self.places |= {
            f"messages[{index}].content[{position}].image_url": part.pop(_WHERE)
            for index, message in enumerate(messages)
            if isinstance(message["content"], list)
            for position, part in enumerate(message["content"])
            if _WHERE in part
        }
        try:
            return msgspec.convert({**given, "messages": messages}, ChatRequest)
        except msgspec.ValidationError as error:
            raise invalid_body(error, ChatRequest) from error

    def _assistant(self) -> dict[str, Any]:
        """Return the assistant message at the end, which is added if there is none."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant"}
            self._add(last)
        return last

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._read_from.append(self.reading)


def required(value: str | None, where: str) -> str:
    """Return the value of a field that must not be empty. Raises InvalidRequest, which names it."""
    if not value:
        raise InvalidRequest(f"{where} is missing", param=where)
    return value


def unsupported_part(kind: str, where: str, known: str) -> InvalidRequest:
    """Return the refusal of a part of a conversation whose type is not served."""
    return InvalidRequest(f"{where} has type {kind[:100]!r}; send {known}", param=where)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Make content that is only text a string, as most chat templates expect."""
    parts = message.get("content")
    if not parts or any(part["type"] != "text" for part in parts):
        return message if parts else {**message, "content": None if "tool_calls" in message else ""}
    return {**message, "content": "".join(part["text"] for part in parts)}
