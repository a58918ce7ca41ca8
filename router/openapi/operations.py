"""All routes of the public listener, with what they take and answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from router.apis.generate_request import GenerateRequest
from router.apis.messages_answer import TokenCount
from router.apis.messages_request import CountRequest, MessagesRequest
from router.apis.responses_answer import InputTokens
from router.apis.responses_request import ResponsesRequest
from router.apis.tokens_request import TokensRequest
from router.http.media_types import JSON, TEXT
from router.openapi.answers import (
    ChatCompletion,
    Generated,
    MessagesAnswer,
    ModelCard,
    ModelInfo,
    ModelList,
    Readiness,
    ResponsesAnswer,
    TextCompletion,
    TokensAnswer,
    Version,
)
from router.requests.openai_schema import ChatRequest, CompletionRequest
from router.requests.tokenize_requests import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from router.routes.control import AbortRequest, AbortRequests
from router.routes.loads import FormerLoad, Loads, ServerLoad
from router.routes.status import MAX_LISTED

EMPTY = ""  # no body


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    Attributes:
        body: type of the JSON body; None for none.
        answer: type of the answer, if it is JSON.
        media: media type of the answer.
        streams: the answer may be a stream of events.
        listed: the answer may be a list of `answer`.
        query: name and JSON schema of a query parameter.
        unready: the answer has the same form with status 503.
    """

    method: str
    path: str
    summary: str
    body: Any = None
    answer: Any = dict[str, Any]
    media: str = JSON
    streams: bool = False
    listed: bool = False
    query: tuple[str, dict[str, Any]] | None = None
    unready: bool = False


_TIMEOUT = ("timeout", {"type": "number", "minimum": 0, "maximum": 60})
_LIMIT = ("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED})

OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatRequest, ChatCompletion, streams=True),
    Operation("post", "/v1/completions", "Continue texts", CompletionRequest, TextCompletion, streams=True),
    Operation(
        "post", "/v1/responses", "Answer a conversation", ResponsesRequest, ResponsesAnswer, streams=True
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a conversation",
        ResponsesRequest,
        InputTokens,
    ),
    Operation("post", "/v1/messages", "Answer a conversation", MessagesRequest, MessagesAnswer, streams=True),
    Operation(
        "post", "/v1/messages/count_tokens", "Count the tokens of a conversation", CountRequest, TokenCount
    ),
    Operation("post", "/generate", "Continue texts", GenerateRequest, Generated, streams=True, listed=True),
    Operation(
        "post",
        "/inference/v1/generate",
        "Continue tokens with tokens",
        TokensRequest,
        TokensAnswer,
        streams=True,
    ),
    Operation("get", "/v1/models", "List the served model", answer=ModelList),
    Operation("get", "/v1/models/{id}", "Describe the served model", answer=ModelCard),
    Operation("post", "/tokenize", "Turn a text or a chat into token ids", TokenizeRequest, TokenizeAnswer),
    Operation("post", "/detokenize", "Turn token ids into text", DetokenizeRequest, DetokenizeAnswer),
    Operation("get", "/tokenizer_info", "Show the tokenizer's settings and the chat template"),
    Operation("post", "/abort_request", "End requests of the same key", AbortRequest, media=EMPTY),
    Operation("post", "/abort_requests", "End requests of the same key", AbortRequests, media=EMPTY),
    Operation("post", "/flush_cache", "Empty the prefix caches of all nodes", media=TEXT, query=_TIMEOUT),
    Operation(
        "post", "/reset_prefix_cache", "Empty the prefix caches of all nodes", media=TEXT, query=_TIMEOUT
    ),
    Operation("get", "/load", "Count the prompts in flight", answer=ServerLoad),
    Operation("get", "/v1/loads", "Show the load of the cluster as SGLang does", answer=Loads),
    Operation("get", "/get_load", "Show the load of the cluster as SGLang did", answer=list[FormerLoad]),
    Operation("get", "/server_info", "Show parameters, nodes and their load"),
    Operation("get", "/model_info", "Describe the model as SGLang does", answer=ModelInfo),
    Operation("get", "/get_model_info", "Describe the model as SGLang does", answer=ModelInfo),
    Operation("get", "/version", "Show the version", answer=Version),
    Operation("get", "/metrics", "Metrics for Prometheus", media=TEXT),
    Operation("get", "/requests", "List the timelines of the last requests", query=_LIMIT),
    Operation("get", "/requests/{id}", "Show the timeline of a recent request"),
    Operation("get", "/live", "Answer while the process runs", media=EMPTY),
    Operation("get", "/health", "Answer 200 while requests can be served", media=EMPTY, unready=True),
    Operation("get", "/ready", "Say whether requests can be served", answer=Readiness, unready=True),
)
