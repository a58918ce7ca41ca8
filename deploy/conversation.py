"""A conversation with a chat model: its messages, the requests that continue it, and answers as they are streamed."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from PIL import Image, UnidentifiedImageError

from common.errors import ConfigError
from deploy.openai_client import BadAnswer, error_sentence, message_of
from deploy.sse import EventSplitter, EventTooLong

MAX_IMAGE_BYTES = 20 << 20
MAX_TOOL_CALLS = 128  # of one answer


class FunctionDelta(msgspec.Struct):
    """A part of a call: its name comes once, its arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    """A part of a tool call."""

    index: int = 0
    id: str | None = None
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


class ChatDelta(msgspec.Struct):
    """A part of an answer."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # as some servers call it
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct):
    """The only choice of a request."""

    delta: ChatDelta = msgspec.field(default_factory=ChatDelta)
    finish_reason: str | None = None


class ChatUsage(msgspec.Struct):
    """The token counts of an answer."""

    completion_tokens: int = 0


class ChatEvent(msgspec.Struct):
    """One event of a streamed chat."""

    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(ChatEvent)


@dataclass(slots=True)
class ToolCall:
    """A tool that the model wants to be called."""

    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON, as the model wrote it


@dataclass(slots=True)
class Reply:
    """An answer, as far as it has arrived."""

    content: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)  # index -> call
    tokens: int = 0
    has_reasoning: bool = False
    finish_reason: str | None = None

    def add(self, delta: ChatDelta) -> None:
        """Append a part. Raises BadAnswer if it has too many tool calls."""
        self.content += delta.content or ""
        self.has_reasoning |= bool(delta.reasoning_content or delta.reasoning)
        for part in delta.tool_calls or ():
            call = self.calls.setdefault(part.index, ToolCall())
            if len(self.calls) > MAX_TOOL_CALLS:
                raise BadAnswer(f"the answer has more than {MAX_TOOL_CALLS} tool calls")
            call.id = part.id or call.id
            call.name += part.function.name or ""
            call.arguments += part.function.arguments or ""

    @property
    def message(self) -> dict[str, Any]:
        """The message for the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": each.id,
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in self.calls.values()
            ]
        return message


class Conversation:
    """The messages so far, and images for the next one."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._messages: list[dict[str, Any]] = []
        self._images: list[str] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a request, the system prompt first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages]

    def reset(self) -> None:
        """Forget all messages and images; the system prompt stays."""
        self._messages.clear()
        self._images.clear()

    def attach(self, path: Path) -> None:
        """Send an image with the next question. Raises ConfigError for files that are not images."""
        self._images.append(image_url(path))

    def ask(self, text: str) -> None:
        """Add a question, with the attached images before it."""
        content: str | list[dict[str, Any]] = text
        if self._images:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
            content = [*parts, {"type": "text", "text": text}]
        self._messages.append({"role": "user", "content": content})
        self._images.clear()

    def take_back(self) -> None:
        """Remove the last question and everything after it."""
        while self._messages and self._messages.pop()["role"] != "user":
            pass

    def drop_open_calls(self) -> None:
        """Remove the last question if its answer is tool calls that have not all been carried out and answered."""
        if self._messages and (self._messages[-1]["role"] == "tool" or "tool_calls" in self._messages[-1]):
            self.take_back()

    def add_reply(self, reply: Reply) -> None:
        """Add an answer, also one that was interrupted."""
        self._messages.append(reply.message)

    def add_result(self, call: ToolCall, result: str) -> None:
        """Add what a tool has returned."""
        self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def image_url(path: Path) -> str:
    """Return an image file as a data URL. Raises ConfigError."""
    file = Path(os.path.expanduser(path))
    try:
        data = file.read_bytes() if file.stat().st_size <= MAX_IMAGE_BYTES else b""
        if not data:
            raise ConfigError(str(path), f"is empty or has more than {MAX_IMAGE_BYTES >> 20} MiB")
        with Image.open(file) as image:
            kind = Image.MIME[image.format or ""]
    except (UnidentifiedImageError, KeyError):
        raise ConfigError(str(path), "is not an image") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def stream_reply(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    reply: Reply,
    show: Callable[[ChatDelta], None],
) -> None:
    """Send a chat request; add each part of the answer to `reply` and show it. Raises BadAnswer.

    `reply` holds what has arrived, even if this is cancelled.
    """
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(url, json=stream) as response:
            if response.status != 200:
                raise BadAnswer(f"{url} answered {response.status}: {error_sentence(await response.read())}")
            async for event in _events(response):
                if event.error:
                    raise BadAnswer(f"the answer broke off: {message_of(event.error)}")
                if event.usage is not None:
                    reply.tokens = event.usage.completion_tokens
                for choice in event.choices[:1]:
                    reply.add(choice.delta)
                    reply.finish_reason = choice.finish_reason or reply.finish_reason
                    show(choice.delta)
    except TimeoutError:
        raise BadAnswer(f"{url} did not answer in time") from None
    except aiohttp.ClientError as error:
        raise BadAnswer(f"cannot reach {url}: {error}") from None


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[ChatEvent]:
    splitter = EventSplitter()
    try:
        async for received in response.content.iter_any():
            for data in splitter.feed(received):
                if data == b"[DONE]":
                    return
                yield _decoder.decode(data)
    except (ValueError, EventTooLong) as error:
        raise BadAnswer(f"the answer is not a stream of chat events: {error}") from None
    raise BadAnswer("the answer ended without [DONE]")
