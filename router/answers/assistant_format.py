"""Formats chat answers that are parsed: reasoning, content and tool calls, complete and as deltas."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.answers.openai_responses import AnswerPiece, ChatFormat, chunk, last_chunk
from router.chat.answer_events import CallArguments, CallOpened, Content, Event, Reasoning
from router.chat.answer_parser import AnswerParser
from router.tokens.names import TokenNames

_encode = msgspec.json.Encoder().encode
# id, model, time of creation, names of tokens, number of log-probabilities, tokens that are listed: see ChatFormat
AnswerHead = tuple[str, str, int, TokenNames, int | None, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of an answer that the client gets.

    Attributes:
        reasoning: names of the fields with the reasoning; none hides it.
        parallel: False passes on only the first call.
        calls_finish: finish_reason of an answer with calls that ended by itself.
        streams_reasoning: False sends the reasoning of a stream in one piece, once it is complete.
        separates_reasoning: False leaves the reasoning in the content, where its tokens are not counted.
    """

    reasoning: tuple[str, ...]
    parallel: bool
    calls_finish: str = "tool_calls"
    streams_reasoning: bool = True
    separates_reasoning: bool = True


@dataclass(slots=True)
class _Message:
    """One choice of an answer that is not streamed."""

    reasoning: list[str] = field(default_factory=list)
    # per call: id, name and pieces of the arguments
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)


class AssistantFormat(ChatFormat):
    """Formats choices whose text goes through parsers, one for each choice."""

    def __init__(self, head: AnswerHead, parsers: Sequence[AnswerParser], shown: Shown) -> None:
        super().__init__(*head)
        self._parsers = parsers
        self._shown = shown
        self._messages = [_Message() for _ in parsers]
        # Tokens whose text is not decided yet, each as the characters of the answer that precede it.
        self._uncounted = [deque[int]() for _ in parsers]
        self.reasoning_tokens = 0 if shown.separates_reasoning else None

    def text_of(self, piece: AnswerPiece) -> str:
        message, text = self._messages[piece.index], []
        for event in self.parsed(piece):
            match event:
                case Content():
                    text.append(event.text)
                case Reasoning():
                    message.reasoning.append(event.text)
                case CallOpened():
                    message.calls.append((event.identity, event.name, []))
                case CallArguments():
                    message.calls[event.index][2].append(event.text)
        return "".join(text)

    def encoded_text(self, index: int, text: str) -> bytes:
        message = self._messages[index]
        content = self.echoed + text
        return b"null" if not content and (message.calls or message.reasoning) else _encode(content)

    def end_of_message(self, index: int) -> bytes:
        message, fields = self._messages[index], b',"refusal":null'
        if message.reasoning:
            reasoning = _encode("".join(message.reasoning))
            fields += b"".join(b"," + _encode(name) + b":" + reasoning for name in self._shown.reasoning)
        if message.calls:
            calls = [
                {
                    "id": identity,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for identity, name, arguments in message.calls
            ]
            fields += b',"tool_calls":' + _encode(calls)
        return fields + b'},"logprobs":'

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        events_of_piece = self.parsed(piece)
        if not self._shown.streams_reasoning:
            events_of_piece = self._gathered(piece, events_of_piece)
        deltas = [self._delta(event) for event in events_of_piece]
        logprobs = b"null"
        if self._logprobs is not None and piece.tokens:
            logprobs = _encode(self._listed(piece))
            deltas = deltas or [b'{"content":""}']
        events = b""
        for delta in deltas:
            events += self._event(chunk(piece.index, delta, logprobs, b"null"), usage)
            logprobs = b"null"
        reason = self.finish_reason(piece.index, piece.finish_reason)
        if reason is not None:
            events += self._event(last_chunk(piece, reason), usage)
        return events

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the reason that the client gets: that of calls unless one that it has to run was cut off."""
        parser = self._parsers[index]
        whole = parser.calls - parser.cut_off
        called = reason == "stop" and (whole == parser.calls if self._shown.parallel else whole > 0)
        return self._shown.calls_finish if called and whole else reason

    def ends_in_call(self, index: int) -> bool:
        parser = self._parsers[index]
        return parser.cut_off and (self._shown.parallel or parser.calls == 1)

    def parsed(self, piece: AnswerPiece) -> list[Event]:
        """Return the events of a piece that the client gets."""
        parser = self._parsers[piece.index]
        events = parser.feed(piece.text)
        if piece.finish_reason is not None:
            events += parser.finish()
        if self.reasoning_tokens is not None:
            tokens = self._uncounted[piece.index]
            tokens.extend(piece.offsets)
            while tokens and (tokens[0] < parser.position or piece.finish_reason is not None):
                self.reasoning_tokens += parser.reasons_at(tokens.popleft())
        if not self._shown.reasoning:
            events = [each for each in events if not isinstance(each, Reasoning)]
        if not self._shown.parallel:
            events = [
                each for each in events if not (isinstance(each, CallOpened | CallArguments) and each.index)
            ]
        return events

    def _gathered(self, piece: AnswerPiece, events: list[Event]) -> list[Event]:
        """Hold reasoning back until something else follows."""
        held, others = self._messages[piece.index].reasoning, list[Event]()
        for event in events:
            if isinstance(event, Reasoning):
                held.append(event.text)
            else:
                others.append(event)
        if held and (others or piece.finish_reason is not None):
            others.insert(0, Reasoning("".join(held)))
            held.clear()
        return others

    def _delta(self, event: Event) -> bytes:
        call: dict[str, Any]
        match event:
            case Content(text):
                return b'{"content":' + _encode(text) + b"}"
            case Reasoning(text):
                return _encode(dict.fromkeys(self._shown.reasoning, text))
            case CallOpened(index, identity, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": identity, "type": "function", "function": function}
            case CallArguments(index, text):
                call = {"index": index, "function": {"arguments": text}}
        return _encode({"tool_calls": [call]})
