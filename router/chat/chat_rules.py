"""Derives from the fields of one chat request the rules for its prompt and for the reading of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.chat.answer_style import AnswerStyle
from router.chat.call_grammar import CallGrammar, CallGrammars
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
        forced: the functions of which the answer must call one; empty if the model chooses freely.
        named: tool_choice names the function.
        strict: names of functions whose arguments must have their schema.
    """

    tools: list[dict[str, Any]]
    variables: dict[str, Any]
    parsed: bool
    reasoning: bool
    shows_reasoning: bool
    streams_reasoning: bool
    parallel: bool
    forced: list[dict[str, Any]]
    named: bool
    strict: frozenset[str]

    def call_grammar(self, style: AnswerStyle, prefix: str) -> tuple[str, CallGrammar] | None:
        """Return the field that constrains the calls of the answer, and the grammar; None if nothing does."""
        if not self.forced and not self.strict:
            return None
        grammars, thought = self._grammars(style), style.thought(prefix)
        if self.forced:
            return "tool_choice", grammars.forced(self.forced, thought, self.parallel and not self.named)
        grammar = grammars.triggered(self.tools, self.strict, thought)
        return None if grammar is None else ("tools", grammar)

    def calls_or_json(self, style: AnswerStyle, prefix: str, schema: str) -> CallGrammar:
        """Return a grammar for calls of the tools, or JSON that `schema` accepts. Only for formats with a marker."""
        grammars, thought = self._grammars(style), style.thought(prefix)
        return grammars.or_json(self.tools, self.strict, schema, thought, self.parallel)

    def _grammars(self, style: AnswerStyle) -> CallGrammars:
        assert style.calls is not None
        return CallGrammars(style.calls, style.think if self.reasoning else None, style.special)


def check_chat(request: ChatRequest, style: AnswerStyle) -> ChatRules:
    """Return the rules of a request. Raises InvalidRequest, which names the field."""
    check_chat_fields(request)
    tools = request.tools or []
    choice = _choice(request, style)
    if tools and choice != "none":
        if style.template is None or not style.template.calls:
            raise InvalidRequest(
                "the format in which this model calls tools is not known; leave tools out, send tool_choice none, or "
                "set model.response_template",
                param="tools",
            )
    else:
        tools = []
    known = template_tools(tools)
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    reasons = style.template is not None and style.template.reasons
    separate = reasons and request.separate_reasoning is not False
    return ChatRules(
        tools=known,
        variables=template_variables(
            request.chat_template_kwargs, request.reasoning_effort, style.template_variables
        ),
        parsed=bool(tools) or separate,
        reasoning=separate,
        shows_reasoning=request.include_reasoning is not False,
        streams_reasoning=request.stream_reasoning is not False,
        parallel=request.parallel_tool_calls is not False,
        forced=[tool for tool in known if choice == "required" or choice == _name(tool)],
        named=choice not in ("none", "auto", "required"),
        strict=strict,
    )


def check_chat_fields(request: ChatRequest) -> None:
    """Check the bounds of tools and of the calls in messages. Raises InvalidRequest."""
    check_tools(request.tools or [])
    for index, message in enumerate(request.messages):
        check_calls(message.tool_calls or [], f"messages[{index}].tool_calls")


def _choice(request: ChatRequest, style: AnswerStyle) -> str:
    """Return none, auto, required, or `function NAME` for a function that must be called. Raises InvalidRequest."""
    given, tools = request.tool_choice, request.tools or []
    if isinstance(given, NamedChoice):
        if given.type != "function":
            raise InvalidRequest("tool_choice.type must be function", param="tool_choice.type")
        if all(tool.function.name != given.function.name for tool in tools):
            raise InvalidRequest(
                f"tool_choice names {given.function.name[:100]!r}, which is not among the tools",
                param="tool_choice.function.name",
            )
        choice = f"function {given.function.name}"
    elif given in (None, "auto", "none", "required"):
        choice = given or "auto"
    else:
        raise InvalidRequest(
            "tool_choice must be none, auto, required or an object that names a function", param="tool_choice"
        )
    if choice not in ("none", "auto") and (not tools or style.calls is None):
        raise InvalidRequest(
            "tool_choice can force a call only with tools, and with a model whose format of calls is known; send auto",
            param="tool_choice",
        )
    if choice == "auto" and (style.calls is None or not style.calls.told_apart):
        for index, tool in enumerate(tools):
            if tool.function.strict:
                where = f"tools[{index}].function.strict"
                raise InvalidRequest(
                    f"{where}: this model marks no calls, so that only tool_choice required or a named function can "
                    "enforce a schema; leave strict out",
                    param=where,
                )
    return choice


def _name(tool: dict[str, Any]) -> str:
    return f"function {tool['function']['name']}"
