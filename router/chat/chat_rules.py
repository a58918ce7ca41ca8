"""What the fields of one chat request mean for its prompt and for the reading of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.chat.answer_style import AnswerStyle
from router.chat.request_fields import (
    NamedChoice,
    check_calls,
    check_tools,
    template_tools,
    template_variables,
)
from router.openai_schema import ChatRequest


@dataclass(frozen=True, slots=True)
class ChatRules:
    """The fields of a request, checked.

    Attributes:
        tools: what the template and the parser get; empty if there are none or tool_choice is none.
        variables: what else the template gets.
        parsed: the answer must be parsed: it may hold calls, or reasoning that is to be separated.
        reasoning: reasoning is separated from the content.
        shows_reasoning: separated reasoning is part of the answer.
        streams_reasoning: a stream shows reasoning while it is generated.
        parallel: more than one call is passed on.
    """

    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    parsed: bool
    reasoning: bool
    shows_reasoning: bool
    streams_reasoning: bool
    parallel: bool


def check_chat(request: ChatRequest, style: AnswerStyle) -> ChatRules:
    """Raises InvalidRequest, which names the field."""
    check_chat_fields(request)
    tools = request.tools or []
    _check_choice(request)
    if tools and request.tool_choice != "none":
        if style.template is None or not style.template.calls:
            raise InvalidRequest(
                "the format in which this model calls tools is not known; leave tools out, send tool_choice none, or "
                "set model.response_template",
                param="tools",
            )
    else:
        tools = []
    reasons = style.template is not None and style.template.reasons
    separate = reasons and request.separate_reasoning is not False
    return ChatRules(
        tools=template_tools(tools),
        variables=template_variables(
            request.chat_template_kwargs, request.reasoning_effort, style.template_variables
        ),
        parsed=bool(tools) or separate,
        reasoning=separate,
        shows_reasoning=request.include_reasoning is not False,
        streams_reasoning=request.stream_reasoning is not False,
        parallel=request.parallel_tool_calls is not False,
    )


def check_chat_fields(request: ChatRequest) -> None:
    """Check the bounds of tools and of the calls in messages. Raises InvalidRequest."""
    check_tools(request.tools or [])
    for index, message in enumerate(request.messages):
        check_calls(message.tool_calls or [], f"messages[{index}].tool_calls")


def _check_choice(request: ChatRequest) -> None:
    choice = request.tool_choice
    if isinstance(choice, NamedChoice) or choice == "required":
        raise InvalidRequest("tool_choice can be none or auto in this version of tandem", param="tool_choice")
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "tool_choice must be none, auto, required or an object that names a function", param="tool_choice"
        )
    for index, tool in enumerate(request.tools or []):
        if tool.function.strict:
            where = f"tools[{index}].function.strict"
            raise InvalidRequest(f"{where} is not supported by this version of tandem", param=where)
