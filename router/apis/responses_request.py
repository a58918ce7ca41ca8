"""Requests of OpenAI's /v1/responses, and what they mean as a chat. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest
from router.apis.chat_builder import ChatBuilder, ChatPart, image_part, required, text_part, unsupported_part
from router.apis.responses_tools import (
    FunctionChoice,
    NamespacedFunction,
    ResponsesTool,
    chat_name,
    chat_tool_choice,
    chat_tools,
    shown_tools,
)
from router.requests.checks import check_logprobs
from router.requests.field_rules import refuse_fields
from router.requests.json_body import decode_json
from router.requests.openai_schema import MAX_MESSAGES, MAX_PARTS, ChatRequest, RequestId, Text
from router.requests.sampling_fields import SamplingFields
from router.templates.message_calls import call_arguments

# Names in refusals: field of the chat -> field of the client's request.
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.function": "tool_choice",
    "truncate_prompt_tokens": "truncation",
}
# Fields that have the same name and meaning in chats.
SAME = (
    *SamplingFields.__struct_fields__,
    "model",
    "request_id",
    "stream",
    "seed",
    "min_tokens",
    "cache_salt",
    "session_id",
    "priority",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "include_reasoning",
    "include_stop_str_in_output",
    "structured_outputs",
)


class InputPart(msgspec.Struct, frozen=True):
    """One part of a message or of a tool's output."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """One item of `input`: a message, or a call and its output."""

    type: str = "message"
    role: str | None = None
    content: Text | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of the called function
    arguments: str | None = None
    output: Text | list[InputPart] | None = None


class TextFormat(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None  # reasoning is returned whole


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    model: str | None = None
    request_id: RequestId | None = None  # as in chats
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: Any = None  # events have no obfuscation
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Any = None  # labels, which the answer repeats
    include: list[str] | None = None  # see _LOGPROBS and _NOT_IN_ANSWERS
    top_logprobs: int | None = None  # counts only if log-probabilities are included, as in vLLM
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None  # a limit of calls of OpenAI's own tools, which are refused
    # as in chats
    seed: int | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    # refused unless they have no effect: see _NEUTRAL
    background: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "enable_response_messages": (False,),
    "previous_input_messages": (),
}
# What `include` may name: the log-probabilities of the text; and what has no effect, because reasoning is text, images
# are not kept, and no answer has the calls of OpenAI's own tools.
_LOGPROBS = "message.output_text.logprobs"
_NOT_IN_ANSWERS = (
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_ROLES = ("user", "assistant", "system", "developer")
_KNOWN_ITEMS = "message, function_call, function_call_output and reasoning items"
_KNOWN_PARTS = (
    "input_text and output_text with `text`, refusal with `refusal`, and input_image with `image_url`"
)


class ResponsesTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request after its translation."""

    chat: ChatRequest
    places: dict[str, str]  # names in refusals besides NAMES, see ChatBuilder and ChatTools
    namespaced: dict[str, NamespacedFunction]  # functions by their names in the chat
    shown: dict[str, Any]  # fields of the request that the answer repeats


_decoder = msgspec.json.Decoder(ResponsesRequest)


def read_responses(raw: bytes | bytearray) -> ResponsesTask:
    """Parse and translate a body. Raises InvalidRequest, which names the field."""
    request = decode_json(raw, _decoder)
    refuse_fields(request, _NEUTRAL)
    included = request.include or ()
    for index, name in enumerate(included):
        if name != _LOGPROBS and name not in _NOT_IN_ANSWERS:
            raise InvalidRequest(
                f"{name[:100]!r} cannot be included; {_LOGPROBS} can", param=f"include[{index}]"
            )
    top = check_logprobs(request.top_logprobs, "top_logprobs")
    chat = ChatBuilder()
    if request.instructions:
        chat.reading = "instructions"
        chat.add_message("system", [text_part(request.instructions)])
    chat.reading = "input"
    if isinstance(request.input, str):
        chat.add_message("user", [text_part(request.input)])
    else:
        _check_parts(request.input)
        for index, item in enumerate(request.input):
            chat.reading = f"input[{index}]"
            _add_item(chat, item, chat.reading)
    tools = chat_tools(request.tools or ())
    fields = {name: getattr(request, name) for name in SAME}
    fields |= {
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "tools": tools.tools or None,
        "tool_choice": chat_tool_choice(request.tool_choice),
        # as in vLLM: the beginning of a prompt that is too long is cut off
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
    }
    if _LOGPROBS in included:
        fields |= {"logprobs": True, "top_logprobs": top}
    return ResponsesTask(
        chat=chat.build(fields),
        places={**chat.places, **tools.places},
        namespaced=tools.namespaced,
        shown=_shown(request),
    )


def _check_parts(items: Iterable[InputItem]) -> None:
    count = sum(
        len(parts) for item in items for parts in (item.content, item.output) if isinstance(parts, list)
    )
    if count > MAX_PARTS:
        raise InvalidRequest(f"the input has {count} parts; the limit is {MAX_PARTS}", param="input")


def _add_item(chat: ChatBuilder, item: InputItem, where: str) -> None:
    match item.type:
        case "message":
            if item.role not in _ROLES:
                raise InvalidRequest(
                    f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role"
                )
            role = "system" if item.role == "developer" else item.role
            chat.add_message(role, _parts(item.content, f"{where}.content"))
        case "function_call":
            name = required(item.name, f"{where}.name")
            identity = required(item.call_id, f"{where}.call_id")
            call_arguments(item.arguments, f"{where}.arguments")
            chat.add_call(identity, chat_name(item.namespace, name), item.arguments or "{}")
        case "function_call_output":
            parts = _parts(item.output, f"{where}.output")
            chat.add_result(required(item.call_id, f"{where}.call_id"), parts)
        case "reasoning":
            if isinstance(item.content, list):
                chat.add_reasoning("".join(part.text or "" for part in item.content))
        case _:
            raise unsupported_part(item.type, where, _KNOWN_ITEMS)


def _parts(content: str | list[InputPart] | None, where: str) -> list[ChatPart]:
    if content is None:
        raise InvalidRequest(f"{where} is missing", param=where)
    if isinstance(content, str):
        return [text_part(content)]
    parts: list[ChatPart] = []
    for index, part in enumerate(content):
        if part.type in ("input_text", "output_text", "text") and part.text is not None:
            parts.append(text_part(part.text))
        elif part.type == "refusal" and part.refusal is not None:
            parts.append(text_part(part.refusal))
        elif part.type == "input_image" and part.image_url is not None:
            parts.append(image_part(part.image_url, f"{where}[{index}].image_url"))
        else:
            raise unsupported_part(part.type, f"{where}[{index}]", _KNOWN_PARTS)
    return parts


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.type == "text":
        return None
    given = text.format
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name or "answer", "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", "json_schema": schema}


def _shown(request: ResponsesRequest) -> dict[str, Any]:
    plain = {"format": {"type": "text"}}
    reasoning = request.reasoning or ReasoningOptions()
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "temperature": request.temperature,
        "text": plain if request.text is None else {**plain, **_given(request.text)},
        "tool_choice": "auto" if request.tool_choice is None else msgspec.to_builtins(request.tool_choice),
        "tools": shown_tools(request.tools or ()),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
    }


def _given(text: TextOptions) -> dict[str, Any]:
    """Return the fields that the client has set."""
    found: dict[str, Any] = {}
    if text.format is not None:
        fields: dict[str, Any] = msgspec.to_builtins(text.format)
        found["format"] = {name: value for name, value in fields.items() if value is not None}
    if text.verbosity is not None:
        found["verbosity"] = text.verbosity
    return found
