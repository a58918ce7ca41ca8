"""Answers of the OpenAI API as Python values: complete, and chunk by chunk. Formats as ECOSYSTEM.md lists them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.messages.generation import OutputToken
from router.tokenizer import Tokenizer

FINGERPRINT = "tandem"


@dataclass(slots=True)
class Usage:
    """Counts over all choices of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Piece:
    """What one choice gained at one moment."""

    index: int
    text: str
    tokens: Sequence[OutputToken]
    offset: int  # characters of this choice given out before
    finish_reason: str | None


@dataclass(slots=True)
class Format(ABC):
    """Common part of both endpoints' formats; subclasses say how a choice looks."""

    whole: ClassVar[str]  # `object` of the complete answer
    part: ClassVar[str]  # `object` of a chunk

    id: str
    model: str
    created: int
    tokenizer: Tokenizer
    logprobs: bool

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            **self.head(self.part),
            "choices": [choice for piece in pieces for choice in self.deltas(piece)],
        }

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    @abstractmethod
    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of a chunk."""

    def closing(self, piece: Piece) -> dict[str, Any] | None:
        """The chunk that carries the finish reason, where it is one of its own."""
        return None

    @abstractmethod
    def choice(
        self, index: int, text: str, pieces: Sequence[Piece], finish_reason: str | None
    ) -> dict[str, Any]:
        """A choice of the complete answer."""

    def complete(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self.head(self.whole), "choices": choices, "usage": usage.report()}


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    whole = "chat.completion"
    part = "chat.completion.chunk"

    def opening(self, choices: int) -> list[dict[str, Any]]:
        return [
            {
                **self.head(self.part),
                "choices": [
                    {
                        "index": i,
                        "delta": {"role": "assistant", "content": ""},
                        "logprobs": None,
                        "finish_reason": None,
                    }
                ],
            }
            for i in range(choices)
        ]

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        if not piece.text and not (self.logprobs and piece.tokens):
            return []
        return [
            {
                "index": piece.index,
                "delta": {"content": piece.text},
                "logprobs": self._logprobs([piece]),
                "finish_reason": None,
            }
        ]

    def closing(self, piece: Piece) -> dict[str, Any] | None:
        last = {"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}
        return {**self.head(self.part), "choices": [last]}

    def choice(
        self, index: int, text: str, pieces: Sequence[Piece], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            self._entry(token) for piece in pieces for token in piece.tokens if token.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: OutputToken) -> dict[str, Any]:
        assert token.logprob is not None
        top = zip(token.logprob.top_ids, token.logprob.top_logprobs)
        return {
            **self._named(token.id, token.logprob.logprob),
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in top],
        }

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.token_text(token_id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


class CompletionFormat(Format):
    """text_completion, whole and in chunks."""

    whole = part = "text_completion"

    def deltas(self, piece: Piece) -> list[dict[str, Any]]:
        if not piece.text and piece.finish_reason is None and not (self.logprobs and piece.tokens):
            return []
        return [self.choice(piece.index, piece.text, [piece], piece.finish_reason)]

    def choice(
        self, index: int, text: str, pieces: Sequence[Piece], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        offsets: list[int] = []
        texts: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        for piece in pieces:
            offset = piece.offset
            for token in piece.tokens:
                if token.logprob is None:
                    continue
                text = self.tokenizer.token_text(token.id)
                offsets.append(offset)
                texts.append(text)
                values.append(max(token.logprob.logprob, -9999.0))
                pairs = zip(token.logprob.top_ids, token.logprob.top_logprobs)
                tops.append({self.tokenizer.token_text(each): max(value, -9999.0) for each, value in pairs})
                offset += len(text)
        return {"text_offset": offsets, "tokens": texts, "token_logprobs": values, "top_logprobs": tops}
