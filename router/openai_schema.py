"""Requests of the OpenAI API as clients send them: typed, bounded, unknown fields ignored as vLLM does.

Fields that a later version will honour stand in NOT_YET with the values that change nothing: those are accepted, every
other value is refused with the field's name.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_MESSAGES = 4096
MAX_PROMPTS = 64  # prompts in one completions request
TOP_LOGPROBS = 20

Text = Annotated[str, Meta(max_length=8 << 20)]
TokenIds = list[int]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: usage in every chunk


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; parts of other types are refused by name."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    role: Annotated[str, Meta(max_length=64)]
    content: Text | list[TextPart] | None = None
    name: str | None = None


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = None
    # not yet: see NOT_YET
    n: Any = None
    best_of: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    prompt_logprobs: Any = None
    priority: Any = None
    cache_salt: Any = None


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Text | list[Any]  # text, texts, token ids, or lists of token ids: see `prompts`
    logprobs: int | None = None
    echo: Any = None
    suffix: Any = None


NOT_YET: dict[str, tuple[Any, ...]] = {  # field -> values that change nothing
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "prompt_logprobs": (),
    "priority": (0,),
    "cache_salt": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
}


def refuse_unsupported(request: SharedFields) -> None:
    """Raises InvalidRequest naming the first field of NOT_YET that would change the answer."""
    for field in request.__struct_fields__:
        neutral = NOT_YET.get(field)
        value = getattr(request, field)
        if (
            neutral is None
            or value is None
            or any((value == each and type(value) is not bool) or value is each for each in neutral)
        ):
            continue
        remedy = f"leave it out or send {neutral[0]!r}" if neutral else "leave it out"
        raise InvalidRequest(f"{field} is not supported by this version of tandem; {remedy}", param=field)


def prompts(request: CompletionRequest) -> list[str | TokenIds]:
    """The prompts of a completions request, one per choice. Raises InvalidRequest("prompt")."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is empty; send a text or token ids", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts in one request, at most {MAX_PROMPTS}", param="prompt")
    for item in prompt:
        if not (
            isinstance(item, str) or (isinstance(item, list) and all(type(each) is int for each in item))
        ):
            raise InvalidRequest(
                "prompt must be a text, a list of texts, a list of token ids, or a list of such lists",
                param="prompt",
            )
    return prompt
