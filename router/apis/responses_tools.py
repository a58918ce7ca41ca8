"""Tools of /v1/responses: functions, also in namespaces, and the choice among them.

Chats have no namespaces: a function there is called NAMESPACE__NAME, and a call of it is translated back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidRequest
from router.apis.chat_builder import required, unsupported_part
from router.requests.chat_fields import CUSTOM_REMEDY


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool; functions are the only type."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesTool(FunctionTool, frozen=True):
    """A function, or a tool of type `namespace`, which groups functions."""

    tools: list[FunctionTool] | None = None  # of a namespace


class AllowedFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the tools, by its name."""

    type: str
    name: str | None = None
    namespace: str | None = None


class FunctionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool_choice of type `function`, which names one, or of type `allowed_tools`, with a mode and tools."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[AllowedFunction] | None = None


class NamespacedFunction(msgspec.Struct, frozen=True):
    """A function of a namespace, by the names that the client uses."""

    namespace: str
    name: str


class ChatTools(msgspec.Struct, frozen=True):
    """Tools after their translation."""

    tools: list[dict[str, Any]]  # as in chats
    namespaced: dict[str, NamespacedFunction]  # by their names in the chat
    places: dict[str, str]  # field of the chat -> the client's field, where their numbers differ


def chat_name(namespace: str | None, name: str) -> str:
    """Return what a function is called in the chat."""
    return f"{namespace}__{name}" if namespace else name


def chat_tools(given: Sequence[ResponsesTool]) -> ChatTools:
    """Translate the tools of a request. Raises InvalidRequest, which names the field."""
    found = ChatTools([], {}, {})
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if tool.type != "namespace":
            _add(found, _function(tool, where), where)
            continue
        namespace, description = required(tool.name, f"{where}.name"), tool.description
        for number, member in enumerate(tool.tools or ()):
            place = f"{where}.tools[{number}]"
            function = _function(member, place)
            name = chat_name(namespace, function["name"])
            found.namespaced[name] = NamespacedFunction(namespace, function["name"])
            function["name"] = name
            if description:
                # said once, because a namespace may have dozens of functions
                function["description"] = "\n\n".join(filter(None, (description, member.description)))
                description = None
            _add(found, function, place)
    return found


def _add(tools: ChatTools, function: dict[str, Any], where: str) -> None:
    tools.places[f"tools[{len(tools.tools)}].function"] = where
    tools.tools.append({"type": "function", "function": function})


def _function(tool: FunctionTool, where: str) -> dict[str, Any]:
    if tool.type == "custom":
        raise InvalidRequest(f"{where} has type 'custom'; {CUSTOM_REMEDY}", param=where)
    if tool.type != "function":
        raise unsupported_part(tool.type, where, "functions: this server runs no tools of its own")
    function = {
        "name": required(tool.name, f"{where}.name"),
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in function.items() if value is not None}


def chat_tool_choice(choice: str | FunctionChoice | None) -> str | dict[str, Any] | None:
    """Translate `tool_choice`. Raises InvalidRequest, which names the field."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        tools = [
            {"type": tool.type, "function": {"name": _chosen(tool, f"tool_choice.tools[{index}].name")}}
            for index, tool in enumerate(choice.tools or ())
        ]
        allowed = {"mode": required(choice.mode, "tool_choice.mode"), "tools": tools}
        return {"type": choice.type, choice.type: allowed}
    if choice.type != "function":
        raise unsupported_part(
            choice.type, "tool_choice", "none, auto, required, a function or allowed_tools"
        )
    return {"type": "function", "function": {"name": _chosen(choice, "tool_choice.name")}}


def _chosen(given: AllowedFunction | FunctionChoice, where: str) -> str:
    return chat_name(given.namespace, required(given.name, where))


def shown_tools(given: Sequence[ResponsesTool]) -> list[dict[str, Any]]:
    """Return the tools as the answer repeats them."""
    return [
        {
            "type": tool.type,
            "name": tool.name,
            "description": tool.description,
            "tools": [*map(_shown, tool.tools or ())],
        }
        if tool.type == "namespace"
        else _shown(tool)
        for tool in given
    ]


def _shown(tool: FunctionTool) -> dict[str, Any]:
    description = {} if tool.description is None else {"description": tool.description}
    return {
        "type": "function",
        "name": tool.name,
        "parameters": tool.parameters,
        "strict": tool.strict,
        **description,
    }
