"""Formats answers of the OpenAI API, complete and as server-sent events.

Events are assembled from bytes: for a streamed token only its text is newly encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from common.messages.generation import OutputToken, PromptLogprob, TokenLogprob
from router.chat.answer_events import Content, Event
from router.dispatch.answer_states import AnswerStates
from router.dispatch.verified_steps import VerifiedSteps
from router.tokens.names import TokenNames

FINGERPRINT = "tandem"
CHAT_ID = "chatcmpl-"  # prefix of an answer's id; the request id follows
COMPLETION_ID = "cmpl-"
LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Token counts over all choices of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0  # placeholders of images in the prompts
    reasoning_tokens: int | None = None  # see `Format.reasoning_tokens`; known at the end of the answer

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.image_tokens:
            found["prompt_tokens_details"]["image_tokens"] = self.image_tokens
        if self.reasoning_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
            found["reasoning_tokens"] = self.reasoning_tokens  # where SGLang has it
        return found


class AnswerPiece(msgspec.Struct):
    """The part of one choice's answer that arrived with one delta."""

    index: int
    text: str
    tokens: Sequence[OutputToken]
    offsets: Sequence[int]  # per token: characters of this choice's text that precede it
    finish_reason: str | None
    completion_tokens: int = 0  # of this choice, up to the end of this piece
    cached_tokens: int | None = None  # in the first piece: prompt tokens found in the prefix cache
    # In the last piece: what has ended the text, a stop string or a token id. See TextStream.
    matched_stop: str | int | None = None
    stop_reason: str | int | None = None
    # In the first piece: scores of the prompt's tokens, from the second one on.
    prompt_logprobs: Sequence[PromptLogprob] = ()
    states: AnswerStates | None = None  # the hidden states of the choice, complete with its last piece
    # In the last piece: the steps that verified drafts of the choice.
    steps: VerifiedSteps | None = None


class Format(ABC):
    """Common part of both endpoints' formats; subclasses define the format of a choice."""

    whole: ClassVar[str]  # `object` of the complete answer
    part: ClassVar[str]  # `object` of a chunk
    lists: ClassVar[tuple[str, ...]]  # keys of `logprobs` whose values are lists
    constant_columns: ClassVar[bytes] = b""  # the remaining members of `logprobs` in a complete answer
    # Bytes between the text and the logprobs of a choice in a complete answer.
    after_text: ClassVar[bytes]

    def __init__(
        self,
        identity: str,
        model: str,
        created: int,
        names: TokenNames,
        logprobs: int | None,
        chosen: Sequence[int] = (),
    ) -> None:
        """`names` of tokens are returned with their log-probabilities.

        Args:
            logprobs: number of top tokens listed with each token; None for no log-probabilities.
            chosen: tokens that the client names, which are listed instead.
        """
        self._head = {"id": identity, "created": created, "model": model, "system_fingerprint": FINGERPRINT}
        self._names = names
        self._logprobs = logprobs
        self._chosen = chosen
        # Keys of `logprobs` in a choice of the complete answer; empty without log-probabilities.
        self.columns: tuple[str, ...] = self.lists if logprobs is not None else ()
        self._before: dict[int, bytes] = {}  # choice -> an event with text only, up to the text
        self._characters: dict[int, int] = {}  # choice -> length of its text so far, where `parsed` reads it
        # Tokens between the markers of reasoning; None where reasoning cannot be distinguished.
        self.reasoning_tokens: int | None = None

    @cached_property
    def _open(self) -> bytes:
        """An event up to its choices."""
        return b"data: " + _encode({"object": self.part, **self._head})[:-1] + b',"choices":['

    def before_choices(self) -> bytes:
        """Return the complete answer up to the member that has its choices."""
        return _encode({"object": self.whole, **self._head})[:-1] + b","

    @abstractmethod
    def before_text(self, index: int) -> bytes:
        """Return a choice of the complete answer up to its text."""

    def text_of(self, piece: AnswerPiece) -> str:
        """Return what a piece adds to the text of its choice in a complete answer."""
        return piece.text

    def encoded_text(self, index: int, text: str) -> bytes:
        """Return the text of a choice as JSON."""
        return _encode(text)

    def end_of_message(self, index: int) -> bytes:
        """Return the members that follow the text of a choice, up to its logprobs."""
        return self.after_text

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        """Return the finish reason of a choice that the client gets."""
        return reason

    def fragments(self, piece: AnswerPiece) -> list[bytes]:
        """Return what a piece adds to each of `columns`: items of a JSON list, without the brackets."""
        listed = self._listed(piece) or {}
        return [_encode(listed[name])[1:-1] for name in self.columns]

    @abstractmethod
    def _listed(self, piece: AnswerPiece) -> dict[str, Any] | None:
        """Return the logprobs of a piece."""

    def _others(self, found: TokenLogprob) -> list[tuple[int, float]]:
        """Return the tokens that are listed with one, and their log-probabilities."""
        if found.chosen:
            return list(zip(self._chosen, found.chosen, strict=True))
        return list(zip(found.top_ids, found.top_logprobs))[: self._logprobs]

    def opening(self, choices: int, usage: bytes) -> bytes:
        """Return the events before the first token. `usage` is the usage member of each event, from `usage_field`."""
        return b""

    @abstractmethod
    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        """Return the events of a piece; b"" while its text is held back."""

    def last_event(self, usage: Usage) -> bytes:
        """Return the final event that stream_options.include_usage requests."""
        return self._event(b"", b',"usage":' + _encode(self.counted(usage).report()))

    def counted(self, usage: Usage) -> Usage:
        """Add what only the format knows to the counts of a complete answer; return them."""
        usage.reasoning_tokens = self.reasoning_tokens
        return usage

    def _event(self, choice: bytes, usage: bytes) -> bytes:
        return self._open + choice + b"]" + usage + b"}\n\n"


class ChatFormat(Format):
    """Formats chat.completion and chat.completion.chunk."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    lists = ("content",)
    constant_columns = b',"refusal":null'
    after_text = b',"refusal":null},"logprobs":'
    echoed = ""  # precedes the content of each choice

    def before_text(self, index: int) -> bytes:
        return b'{"index":%d,"message":{"role":"assistant","content":' % index

    @property
    def lists_logprobs(self) -> bool:
        """True if the answer has the log-probabilities of its tokens."""
        return self._logprobs is not None

    def encoded_logprobs(self, tokens: Sequence[OutputToken]) -> list[bytes]:
        """Return the log-probabilities of tokens, each as JSON."""
        return [_encode(self._entry(token)) for token in tokens if token.logprob is not None]

    def ends_in_call(self, index: int) -> bool:
        """Return whether a finished choice ends with a call that is cut off."""
        return False

    def parsed(self, piece: AnswerPiece) -> list[Event]:
        """Return what a piece adds to the answer's parts. Each piece is parsed once: here, or where it is encoded."""
        if not piece.text:
            return []
        start = self._characters.get(piece.index, 0)
        self._characters[piece.index] = end = start + len(piece.text)
        return [Content(piece.text, ((start, end),))]

    def opening(self, choices: int, usage: bytes) -> bytes:
        deltas = [b'{"role":"assistant","content":""}']
        if self.echoed:
            deltas.append(b'{"content":' + _encode(self.echoed) + b"}")
        begun = [chunk(i, delta, b"null", b"null") for delta in deltas for i in range(choices)]
        return b"".join(self._event(each, usage) for each in begun)

    def encoded_text(self, index: int, text: str) -> bytes:
        return _encode(self.echoed + text)

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        if self._logprobs is None and piece.finish_reason is None:
            if not piece.text:
                return b""
            before = self._before.get(piece.index)
            if before is None:
                before = self._before[piece.index] = b'%b{"index":%d,"delta":{"content":' % (
                    self._open,
                    piece.index,
                )
            return b'%b%b},"logprobs":null,"finish_reason":null}]%b}\n\n' % (
                before,
                _encode(piece.text),
                usage,
            )
        events = b""
        if piece.text or (self._logprobs is not None and piece.tokens):
            logprobs = b"null" if self._logprobs is None else _encode(self._listed(piece))
            delta = b'{"content":' + _encode(piece.text) + b"}"
            events = self._event(chunk(piece.index, delta, logprobs, b"null"), usage)
        if piece.finish_reason is not None:
            events += self._event(last_chunk(piece, piece.finish_reason), usage)
        return events

    def _listed(self, piece: AnswerPiece) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return {
            "content": [self._entry(token) for token in piece.tokens if token.logprob is not None],
            "refusal": None,
        }

    def _entry(self, token: OutputToken) -> dict[str, Any]:
        found = token.logprob
        assert found is not None
        top = self._others(found)
        if found.chosen:
            # As in vLLM, beginning with the token itself; each token once.
            top = list({token.id: found.logprob, **dict(top)}.items())
        return {
            **self._named(token.id, found.logprob),
            "top_logprobs": [self._named(token_id, value) for token_id, value in top],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.token_text(token_id),
            "logprob": max(LOWEST_LOGPROB, logprob),
            "bytes": list(self._names.token_bytes(token_id)),
        }


class CompletionFormat(Format):
    """Formats text_completion, complete and in chunks."""

    whole = part = "text_completion"

    lists = ("text_offset", "tokens", "token_logprobs", "top_logprobs")
    after_text = b',"logprobs":'

    def before_text(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def events(self, piece: AnswerPiece, usage: bytes) -> bytes:
        if self._logprobs is None and piece.finish_reason is None:
            if not piece.text:
                return b""
            before = self._before.get(piece.index)
            if before is None:
                before = self._before[piece.index] = b'%b{"index":%d,"text":' % (self._open, piece.index)
            return (
                b'%b%b,"logprobs":null,"finish_reason":null,"stop_reason":null,"matched_stop":null}]%b}\n\n'
            ) % (before, _encode(piece.text), usage)
        listed = self._listed(piece)
        if not (piece.text or piece.finish_reason or (listed is not None and piece.tokens)):
            return b""
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            piece.index,
            _encode(piece.text),
            b"null" if listed is None else _encode(listed),
            _encode(piece.finish_reason),
            end_members(piece),
        )
        return self._event(choice, usage)

    def _listed(self, piece: AnswerPiece) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        text_of = self._names.token_text
        offsets: list[int] = []
        texts: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        for token, offset in zip(piece.tokens, piece.offsets):
            if (found := token.logprob) is None:
                continue
            offsets.append(offset)
            texts.append(text_of(token.id))
            values.append(max(LOWEST_LOGPROB, found.logprob))
            top: dict[str, float] = {}
            # The sampled token is always listed. Of several tokens with the same text, the most likely one counts.
            for each, value in [*self._others(found), (token.id, found.logprob)]:
                top.setdefault(text_of(each), max(LOWEST_LOGPROB, value))
            tops.append(top)
        return {"text_offset": offsets, "tokens": texts, "token_logprobs": values, "top_logprobs": tops}


def usage_field(usage: Usage) -> bytes:
    """Return the member `,"usage":{...}` of an event."""
    return (
        b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}'
    ) % (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        usage.cached_tokens,
    )


def error_event(body: dict[str, Any]) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def chunk(index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
        index,
        delta,
        logprobs,
        finish_reason,
    )


def last_chunk(piece: AnswerPiece, finish_reason: str) -> bytes:
    """Return the chunk that ends a choice. As in vLLM, only this one of a chat has the `stop_reason`."""
    return chunk(piece.index, b"{}", b"null", _encode(finish_reason))[:-1] + end_members(piece) + b"}"


def end_members(piece: AnswerPiece) -> bytes:
    """Return the members of a choice that follow its `finish_reason`: vLLM's and SGLang's name for what ended it."""
    return b',"stop_reason":%b,"matched_stop":%b' % (_encode(piece.stop_reason), _encode(piece.matched_stop))
