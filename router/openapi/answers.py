"""The answers of the routes as structs. They only describe answers, which are made elsewhere; a test compares both."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: int | str


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every error, except those of /v1/messages."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    message: str
    param: str | None


class MessagesError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of /v1/messages."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    image_tokens: int | None = None


class ReasoningTokens(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: ReasoningTokens | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: TokenUsage


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions without `stream`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    matched_stop: str | int | None


class TextCompletion(Answer, frozen=True, kw_only=True):
    """The answer of /v1/completions without `stream`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class GenerateMeta(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    e2e_latency: float
    spec_verify_ct: int | None = None
    spec_accept_length: float | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /generate to one prompt without `stream`; several prompts give a list."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class TokensChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str
    token_ids: list[int]


class TokensAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /inference/v1/generate without `stream`."""

    request_id: str
    model: str
    created: int
    choices: list[TokensChoice]
    usage: TokenUsage
    prompt_logprobs: list[dict[str, Any] | None] | None


class ResponsesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/responses without `stream`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]
    error: None


class MessagesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages without `stream`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, Any]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"]
    data: list[ModelCard]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    max_model_len: int


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["ready", "degraded", "not ready"]
    reason: str | None = None
    missing: list[dict[str, str]] | None = None
