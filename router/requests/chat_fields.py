"""The fields of chat requests that belong to tools and reasoning, and their bounds. Every refusal names its field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest
from router.requests.reasoning_fields import EFFORTS, Effort, ReasoningSwitch, ThinkingSwitch

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20  # JSON text of all tools
MAX_DEPTH = 32  # nesting of a tool's parameters
MAX_VALUES = 50_000  # in the parameters of all tools
MAX_CALLS = 128  # in one message
MAX_VARIABLE_LENGTH = 1024  # characters of one value in chat_template_kwargs
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_PARAMETERS = "parameters"
CUSTOM_REMEDY = "this server calls only functions: declare one whose parameters are an object with one string"

Identity = Annotated[str, Meta(max_length=256)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]
ArgumentsText = Annotated[str, Meta(max_length=8 << 20)]


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool; functions are the only type."""

    type: str = "function"
    function: Function | None = None


class ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True):
    """One of the tools, by its name."""

    type: str = "function"
    function: ChosenFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """The tools that one answer may call, of those that the request declares; `mode` is auto or required."""

    mode: str
    tools: list[ChosenTool]


class ChatToolChoice(msgspec.Struct, frozen=True):
    """A tool_choice of type `function`, which names one, or of type `allowed_tools`."""

    type: str = "function"
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A call that an assistant message reports; `arguments` as JSON text, as in answers, or as an object."""

    name: FunctionName
    arguments: ArgumentsText | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: Identity | None = None
    type: str = "function"


def check_tools(tools: Sequence[Tool]) -> list[Function]:
    """Check number, names, size and nesting; return the functions. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; the limit is {MAX_TOOLS}", param="tools")
    functions, names, values = list[Function](), set[str](), 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            remedy = CUSTOM_REMEDY if tool.type == "custom" else "only functions can be called"
            raise InvalidRequest(f"{where}.type is {tool.type[:100]!r}; {remedy}", param=f"{where}.type")
        if tool.function is None:
            raise InvalidRequest(f"{where}.function is missing", param=f"{where}.function")
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name must have 1 to 128 letters, digits or _ . : / -",
                param=f"{where}.function.name",
            )
        if name in names:
            raise InvalidRequest(f"two tools are called {name!r}", param=f"{where}.function.name")
        names.add(name)
        functions.append(tool.function)
        values += check_json(tool.function.parameters, f"{where}.function.{_PARAMETERS}", MAX_VALUES - values)
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"the tools have {size} bytes; the limit is {MAX_TOOLS_BYTES}", param="tools")
    return functions


def allowed_functions(given: AllowedTools, functions: Sequence[Function]) -> list[Function]:
    """Return those of the functions that `allowed_tools` lists, in the order of `functions`. Raises InvalidRequest."""
    where = "tool_choice.allowed_tools"
    if given.mode not in ("auto", "required"):
        raise InvalidRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    if not given.tools:
        raise InvalidRequest(f"{where}.tools is empty; send tool_choice none", param=f"{where}.tools")
    names = set[str]()
    for index, tool in enumerate(given.tools):
        names.add(chosen_name(tool.type, tool.function, functions, f"{where}.tools[{index}]"))
    return [function for function in functions if function.name in names]


def chosen_name(kind: str, chosen: ChosenFunction | None, functions: Sequence[Function], where: str) -> str:
    """Return the name of a function that the field `where` chooses. Raises InvalidRequest."""
    if kind != "function":
        known = "function or allowed_tools" if where == "tool_choice" else "function"
        raise InvalidRequest(f"{where}.type must be {known}", param=f"{where}.type")
    if chosen is None:
        raise InvalidRequest(f"{where}.function is missing", param=f"{where}.function")
    if all(function.name != chosen.name for function in functions):
        raise InvalidRequest(
            f"{where} names {chosen.name[:100]!r}, which is not among the tools",
            param=f"{where}.function.name",
        )
    return chosen.name


def check_json(value: Any, where: str, most: int) -> int:
    """Count the values inside a JSON value. Raises InvalidRequest beyond `most`, MAX_DEPTH or 64-bit integers."""
    count, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif type(each) is int and not -(2**63) <= each < 2**64:
                raise InvalidRequest(f"the integers of {where} must fit in 64 bits", param=where)
        count += len(inner)
        if count > most:
            raise InvalidRequest(f"{where} has too many values; shorten it", param=where)
        if not inner:
            return count
        level = inner
    raise InvalidRequest(f"{where} nests more than {MAX_DEPTH} levels deep", param=where)


def check_calls(calls: Sequence[ToolCall], where: str) -> None:
    """Check the calls of one message. Raises InvalidRequest."""
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{where} has {len(calls)} calls; the limit is {MAX_CALLS}", param=where)
    for index, call in enumerate(calls):
        if call.type != "function":
            raise InvalidRequest(
                f"{where}[{index}].type is {call.type[:100]!r}; only functions can be called",
                param=f"{where}[{index}].type",
            )
        if isinstance(call.function.arguments, dict):
            check_json(call.function.arguments, f"{where}[{index}].function.arguments", MAX_VALUES)


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Return the tools as chat templates print them."""
    return [{"type": "function", "function": _function(each)} for each in functions]


def _function(function: Function) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    if function.parameters is not None:
        found[_PARAMETERS] = function.parameters
    return found


def template_variables(
    given: dict[str, Any] | None,
    effort: Effort | None,
    allowed: frozenset[str],
    reasoning: ReasoningSwitch | None = None,
    thinking: ThinkingSwitch | None = None,
) -> dict[str, Any]:
    """Check the fields that set variables of the chat template, and return the variables."""
    variables: dict[str, Any] = {}
    enabled, field = None, "reasoning_effort"
    if reasoning is not None:
        enabled = reasoning.enable if reasoning.enabled is None else reasoning.enabled
        for name in ("reasoning_effort", "effort"):
            if getattr(reasoning, name) is not None:
                effort, field = getattr(reasoning, name), f"reasoning.{name}"
    if effort is not None:
        if isinstance(effort, str) and effort not in EFFORTS:
            raise InvalidRequest(
                f"{field} must be one of {', '.join(EFFORTS)}, or a number below 1", param=field
            )
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if thinking is not None:
        enabled = thinking.type != "disabled"
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    if thinking is not None and thinking.clear_thinking is not None:
        _check_allowed("clear_thinking", "thinking.clear_thinking", allowed)
        variables["clear_thinking"] = thinking.clear_thinking
    for name, value in (given or {}).items():
        where = f"chat_template_kwargs.{name[:100]}"
        _check_allowed(name, where, allowed)
        if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > MAX_VARIABLE_LENGTH):
            raise InvalidRequest(
                f"{where} must be true, false, null, a number or a text of at most {MAX_VARIABLE_LENGTH} characters",
                param=where,
            )
        check_json(value, where, 0)
        variables[name] = value
    return variables


def _check_allowed(name: str, where: str, allowed: frozenset[str]) -> None:
    """Raise InvalidRequest for a variable, sent as the field `where`, that requests may not set."""
    if name not in allowed:
        raise InvalidRequest(
            f"{where} is not a variable that this server lets clients set; it lists them in "
            "model.chat_template_kwargs",
            param=where,
        )
