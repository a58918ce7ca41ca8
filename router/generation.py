"""What the HTTP side asks of the dispatcher: tokens for token ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from common.messages.generation import ImageSpan, OutputToken, SamplingParams


@dataclass(frozen=True, slots=True)
class PromptImage:
    """One image and where it stands in the prompt."""

    span: ImageSpan
    data: bytes


@dataclass(slots=True)
class Batch:
    """What the prompts of one HTTP request share. Where one of them fails, the others end with it."""

    failed: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, validated."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    timeout_s: float | None = None
    images: tuple[PromptImage, ...] = ()
    client: str = ""  # API key id, or the client's address where the cluster has no keys
    weight: int = 1  # of the client, when clients wait for room
    salt: bytes = b""  # cached pages are shared within one salt only
    batch: Batch = field(default_factory=Batch)


@dataclass(slots=True)
class TokenDelta:
    """Tokens that arrived together."""

    tokens: list[OutputToken]
    finish_reason: str | None  # on the last delta
    cached_tokens: int | None  # on the first delta: prompt tokens found in the prefill node's cache


class AnswerComplete(Exception):
    """Thrown into a generator by its reader: the text is whole, more tokens are not wanted (a stop string)."""


class Generator(Protocol):
    """Closing the generator means that the client is gone, or that the request's batch has failed;
    `athrow(AnswerComplete())` that the client has what it wants. Both nodes are freed then. Raises RequestError."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]: ...
