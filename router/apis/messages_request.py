"""Requests of Anthropic's /v1/messages, and what they mean as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest
from router.apis.chat_builder import ChatBuilder, ChatPart, required, text_part, unsupported_part
from router.apis.messages_blocks import (
    READ_BLOCKS,
    REFERENCE,
    ContentBlock,
    block_parts,
    content_parts,
    given_parts,
)
from router.requests.field_rules import refuse_fields
from router.requests.json_body import decode_json
from router.requests.openai_schema import MAX_MESSAGES, MAX_PARTS, ChatRequest, Text
from router.requests.reasoning_fields import EFFORTS

# Names in refusals: field of the chat -> field of the client's request.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "continue_final_message": "messages",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format.schema",
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


class InputMessage(msgspec.Struct, frozen=True):
    role: str
    content: Text | list[ContentBlock]


class ClientTool(msgspec.Struct, frozen=True):
    """A tool of the client; tools that the server runs are refused."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # not in the prompt until a result of a tool search refers to it


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The switch by which the model reasons before it answers."""

    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None  # omitted: the answer has no reasoning

    @property
    def budget(self) -> int | None:
        """The most tokens of reasoning; None: any number."""
        return 0 if self.type == "disabled" else self.budget_tokens


class OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    """The form of the answer, and the effort of the model."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: Text | list[ContentBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None  # vLLM's
    # refused unless they have no effect: see _NEUTRAL
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    output_format: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    # The whole conversation is read at each request: nothing that the model has thought is taken out. The first
    # value is what a refusal advises.
    "context_management": (
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": []},
        {},
    ),
    "output_format": (),
}
_KNOWN_BLOCKS = "text, image, document, search_result, tool_use, tool_result and thinking"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"enabled": "medium", "adaptive": "medium", "disabled": "none"}
_THINKS = ("enabled", "adaptive")


class MessagesTask(msgspec.Struct, frozen=True, kw_only=True):
    """A request after its translation."""

    chat: ChatRequest
    places: dict[str, str]  # names in refusals besides NAMES, see ChatBuilder and _loaded_tools


_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


def read_messages(raw: bytes | bytearray) -> MessagesTask:
    """Parse and translate a body. Raises InvalidRequest, which names the field."""
    request = decode_json(raw, _decoder)
    refuse_fields(request, _NEUTRAL)
    fields = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "cache_salt": request.cache_salt,
        "thinking_token_budget": None if request.thinking is None else request.thinking.budget,
    }
    return _task(request, fields)


def read_count(raw: bytes | bytearray) -> MessagesTask:
    """Parse and translate a body of /count_tokens. Raises InvalidRequest, which names the field."""
    return _task(decode_json(raw, _count_decoder), {})


def _task(request: CountRequest, fields: dict[str, Any]) -> MessagesTask:
    parts = sum(len(each.content) for each in request.messages if isinstance(each.content, list))
    if parts > MAX_PARTS:
        raise InvalidRequest(f"the messages have {parts} blocks; the limit is {MAX_PARTS}", param="messages")
    chat = ChatBuilder()
    if request.system:
        chat.reading = "system"
        chat.add_message("system", content_parts(request.system, "system"))
    for index, message in enumerate(request.messages):
        chat.reading = f"messages[{index}]"
        _add_message(chat, message, chat.reading)
    if chat.ends_with_assistant:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    choice, output = request.tool_choice, request.output_config or OutputConfig()
    fields |= _reasoning(output.effort, request.thinking)
    if output.format is not None:
        fields["response_format"] = _response_format(output.format)
    tools, places = _loaded_tools(request)
    fields |= {
        "model": request.model,
        "chat_template_kwargs": request.chat_template_kwargs,
        "tools": tools or None,
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
    }
    return MessagesTask(chat=chat.build(fields), places={**chat.places, **places})


def _reasoning(effort: str | None, thinking: Thinking | None) -> dict[str, Any]:
    """Return the fields of a chat that say how much the model reasons, and whether the answer shows it."""
    fields: dict[str, Any] = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequest(
                f"output_config.effort must be one of {', '.join(EFFORTS)}", param="output_config.effort"
            )
        fields["reasoning_effort"] = effort
    if thinking is not None and not (effort and thinking.type in _THINKS):
        if thinking.type not in _EFFORTS:
            raise unsupported_part(thinking.type, "thinking", ", ".join(_EFFORTS))
        fields["reasoning_effort"] = _EFFORTS[thinking.type]
    if thinking is not None and thinking.display == "omitted":
        fields["include_reasoning"] = False
    return fields


def _add_message(chat: ChatBuilder, message: InputMessage, where: str) -> None:
    if message.role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(message.content, str):
        chat.add_message(message.role, [text_part(message.content)])
        return
    if not message.content and message.role != "assistant":
        raise InvalidRequest(f"{where}.content is empty; send a text or blocks", param=f"{where}.content")
    # Results of tools become messages of their own: the texts between them stay in their order.
    parts: list[ChatPart] = []
    for index, block in enumerate(message.content):
        place = f"{where}.content[{index}]"
        if block.type in READ_BLOCKS:
            parts += block_parts(block, place)
            continue
        if parts:
            chat.add_message(message.role, parts)
            parts = []
        _add_block(chat, block, place)
    if parts:
        chat.add_message(message.role, parts)


def _add_block(chat: ChatBuilder, block: ContentBlock, where: str) -> None:
    match block.type:
        case "tool_use":
            name = required(block.name, f"{where}.name")
            chat.add_call(required(block.id, f"{where}.id"), name, block.input or {})
        case "tool_result":
            identity = required(block.tool_use_id, f"{where}.tool_use_id")
            chat.add_result(identity, given_parts(block.content, f"{where}.content"))
        case "thinking":
            chat.add_reasoning(block.thinking or "")
        case "redacted_thinking":
            pass  # nothing that the model could read
        case _:
            raise unsupported_part(block.type, where, _KNOWN_BLOCKS)


def _response_format(given: OutputFormat) -> dict[str, Any]:
    if given.type != "json_schema" or given.schema is None:
        raise InvalidRequest(
            "output_config.format needs the type json_schema and a schema", param="output_config.format"
        )
    schema = {"name": "answer", "schema": given.schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _loaded_tools(request: CountRequest) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the tools that the prompt shows, and the client's names of their fields. Raises InvalidRequest.

    The messages must have been read: their results of tools are checked.
    """
    references = {
        block["tool_name"]
        for message in request.messages
        if isinstance(message.content, list)
        for result in message.content
        if result.type == "tool_result" and isinstance(result.content, list)
        for block in result.content
        if block["type"] == REFERENCE
    }
    tools, places = list[dict[str, Any]](), dict[str, str]()
    for index, tool in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        function = _tool(tool, where)
        if tool.defer_loading and tool.name not in references:
            continue
        place = f"tools[{len(tools)}].function"
        places |= {place: where, f"{place}.parameters": f"{where}.input_schema"}
        tools.append(function)
    return tools, places


def _tool(tool: ClientTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported_part(tool.type, where, "custom tools: this server runs no tools of its own")
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": required(choice.name, "tool_choice.name")}}
    if choice.type not in _CHOICES:
        raise unsupported_part(choice.type, "tool_choice", "auto, any, none or tool")
    return _CHOICES[choice.type]
