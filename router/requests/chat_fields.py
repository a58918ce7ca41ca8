"""The fields of chat requests that belong to tools and reasoning, and their bounds. Every refusal names its field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 1 << 20  # JSON text of all tools
MAX_DEPTH = 32  # nesting of a tool's parameters
MAX_VALUES = 50_000  # in the parameters of all tools
MAX_CALLS = 128  # in one message
MAX_VARIABLE_LENGTH = 1024  # characters of one value in chat_template_kwargs
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_PARAMETERS = "parameters"

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

    type: str
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """A tool_choice that names a function."""

    type: str
    function: ChosenFunction


class CalledFunction(msgspec.Struct, frozen=True):
    """A call that an assistant message reports; `arguments` as JSON text, as in answers, or as an object."""

    name: FunctionName
    arguments: ArgumentsText | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: Identity | None = None
    type: str = "function"


def check_tools(tools: Sequence[Tool]) -> None:
    """Check number, names, size and nesting. Raises InvalidRequest."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; the limit is {MAX_TOOLS}", param="tools")
    names, values = set[str](), 0
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise InvalidRequest(
                f"{where}.type is {tool.type[:100]!r}; only functions can be called", param=f"{where}.type"
            )
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"{where}.function.name must have 1 to 128 letters, digits or _ . : / -",
                param=f"{where}.function.name",
            )
        if name in names:
            raise InvalidRequest(f"two tools are called {name!r}", param=f"{where}.function.name")
        names.add(name)
        values += check_json(tool.function.parameters, f"{where}.function.{_PARAMETERS}", MAX_VALUES - values)
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"the tools have {size} bytes; the limit is {MAX_TOOLS_BYTES}", param="tools")


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


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools as chat templates print them."""
    return [{"type": "function", "function": _function(tool.function)} for tool in tools]


def _function(function: Function) -> dict[str, Any]:
    found: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        found["description"] = function.description
    if function.parameters is not None:
        found[_PARAMETERS] = function.parameters
    return found


def template_variables(
    given: dict[str, Any] | None, effort: str | None, allowed: frozenset[str]
) -> dict[str, Any]:
    """Check `chat_template_kwargs` and `reasoning_effort`. Return the variables that the template gets."""
    variables: dict[str, Any] = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequest(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", param="reasoning_effort"
            )
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    for name, value in (given or {}).items():
        where = f"chat_template_kwargs.{name[:100]}"
        if name not in allowed:
            raise InvalidRequest(
                f"{where} is not a variable that this server lets clients set; it lists them in "
                "model.chat_template_kwargs",
                param=where,
            )
        if isinstance(value, dict | list) or (isinstance(value, str) and len(value) > MAX_VARIABLE_LENGTH):
            raise InvalidRequest(
                f"{where} must be true, false, null, a number or a text of at most {MAX_VARIABLE_LENGTH} characters",
                param=where,
            )
        check_json(value, where, 0)
        variables[name] = value
    return variables
