"""Sends one completion and notes when its events arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from deploy.openai_client import error_sentence, message_of
from deploy.sse import EventSplitter, EventTooLong

CHARACTERS_OF_ERRORS = 300
TOO_MANY = 429


@dataclass(slots=True)
class RequestTimes:
    """One request. All times are seconds; `first` counts from the time at which the request was due."""

    lag: float = 0.0  # from the due time until it was sent
    first: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between consecutive events with tokens
    tokens: int = 0
    error: str = ""
    invalid: bool = False  # the server refused it with a status that says that it would do so again

    @property
    def per_token(self) -> float:
        """Return the seconds per token after the first; one event may carry several."""
        return sum(self.gaps) / max(self.tokens - 1, 1)

    @property
    def total(self) -> float:
        """Return the seconds from the due time to the last token."""
        return self.first + sum(self.gaps)

    def within(self, first: float, gap: float) -> bool:
        """Return whether it succeeded with its first token and every gap within the limits, in seconds."""
        return not self.error and self.first <= first and max(self.gaps, default=0.0) <= gap


class StreamedUsage(msgspec.Struct):
    """The token counts of an answer."""

    completion_tokens: int = 0


class StreamedChoice(msgspec.Struct):
    """The part of an event that belongs to the answer."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Return whether it is more than the end: tokens without a complete character have an empty text."""
        return bool(self.text or self.token_ids) or self.finish_reason is None


class StreamedEvent(msgspec.Struct):
    """One event of a streamed completion."""

    choices: list[StreamedChoice] = []
    usage: StreamedUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(StreamedEvent)


class RequestFailed(Exception):
    """The server refused the request or broke its stream."""


async def stream_completion(
    session: aiohttp.ClientSession, url: str, body: bytes, due: float | None = None
) -> RequestTimes:
    """Send a completion and read its stream; failures are in `error`. `due`: perf_counter seconds; None: now.

    `body` asks for a stream with its usage.
    """
    sent = time.perf_counter()
    times = RequestTimes(lag=0.0 if due is None else sent - due)
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                times.invalid = 400 <= response.status < 500 and response.status != TOO_MANY
                text = error_sentence(await response.read())[:CHARACTERS_OF_ERRORS]
                raise RequestFailed(f"status {response.status}: {text}")
            await _read(response, times, sent if due is None else due)
    except TimeoutError:
        times.error = "no answer in time"
    except (aiohttp.ClientError, EventTooLong, RequestFailed, ValueError) as error:
        times.error = str(error) or type(error).__name__
    return times


async def _read(response: aiohttp.ClientResponse, times: RequestTimes, due: float) -> None:
    splitter = EventSplitter()
    last: float | None = None
    ended = False
    async for received in response.content.iter_any():
        now = time.perf_counter()
        for data in splitter.feed(received):
            if data == b"[DONE]":
                ended = True
                continue
            event = _decoder.decode(data)
            if event.error:
                raise RequestFailed(f"the stream broke: {message_of(event.error)[:CHARACTERS_OF_ERRORS]}")
            if event.usage is not None:
                times.tokens = event.usage.completion_tokens
            if not any(choice.has_tokens for choice in event.choices):
                continue
            if last is None:
                times.first = now - due
            else:
                times.gaps.append(now - last)
            last = now
    if not ended:
        raise RequestFailed("the stream ended without [DONE]")
    if last is None:
        raise RequestFailed("an answer without a token")
    # A server that reports no usage sends at least one token per event.
    times.tokens = times.tokens or len(times.gaps) + 1
