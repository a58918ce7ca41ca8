"""Requests of /tokenize and /detokenize as clients send them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.requests.chat_fields import ChatToolChoice, Tool
from router.requests.openai_schema import MAX_MESSAGES, Message, Text
from router.requests.reasoning_fields import Effort, ReasoningSwitch, ThinkingSwitch

MAX_TEXTS = 1024  # in one request


class TokenizeRequest(msgspec.Struct, frozen=True):
    """The body of POST /tokenize: either `prompt` or `messages`, which are rendered as for a chat."""

    model: str | None = None
    # one text or, as in SGLang, several
    prompt: Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_TEXTS)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    # default: true for a prompt, false for messages, whose template writes the special tokens
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # as in a chat request, for messages only
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ChatToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningSwitch | None = None
    thinking: ThinkingSwitch | None = None
    # refused unless they have no effect, as in a chat
    chat_template: Any = None
    documents: Any = None
    functions: Any = None
    function_call: Any = None
    # refused here: see TOKENIZE_NOT_YET
    input_ids: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


# field -> values that have no effect: a chat may have these fields
TOKENIZE_NOT_YET: dict[str, tuple[Any, ...]] = {
    "input_ids": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
}


class DetokenizeRequest(msgspec.Struct, frozen=True):
    """The body of POST /detokenize."""

    tokens: list[int | list[int]]  # ids of one text or, as in SGLang, of each text
    model: str | None = None
    skip_special_tokens: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """The answer of /tokenize. All of it is in lists, one item for each text, if `prompt` is a list."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    # entries of the vocabulary, if `return_token_strs` asked for them
    token_strs: list[str | list[str]] | None = None


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The answer of /detokenize: the text under the names of vLLM and SGLang, or a list of texts."""

    prompt: str | list[str]
    text: str | list[str]
