"""Derives from the fields of one chat request the rules for its prompt and for the reading of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest
from router.chat.answer_style import AnswerStyle
from router.chat.call_formats import CallSupport
from router.chat.call_grammar import CallGrammars
from router.grammar.lark import Lark
from router.requests.chat_fields import (
    ChatToolChoice,
    Function,
    Tool,
    allowed_functions,
    check_calls,
    check_tools,
    chosen_name,
    template_tools,
    template_variables,
)
from router.requests.openai_schema import ChatRequest, Message, compact_chat
from router.requests.thinking_budget import Budget, asked_budget


@dataclass(frozen=True, slots=True)
class ReasoningRules:
    """Options for the reasoning in an answer."""

    separated: bool  # from the content
    shown: bool  # separated reasoning is part of the answer
    streamed: bool  # a stream shows reasoning while it is generated
    budget: Budget | None = None  # of its tokens

    @property
    def expected(self) -> bool:
        """True if a constraint of the answer leaves room for reasoning."""
        return self.separated or self.budget is not None


@dataclass(frozen=True, slots=True)
class CallRules:
    """The tools that an answer may call, and those that it must call.

    Attributes:
        tools: what the template and the parser get; empty if there are none or tool_choice is none.
        forced: the functions of which the answer must call one; empty if the model chooses freely.
        named: tool_choice names the function.
        strict: names of functions whose arguments must have their schema.
        parallel: more than one call is passed on.
    """

    tools: list[dict[str, Any]]
    forced: list[dict[str, Any]]
    named: bool
    strict: frozenset[str]
    parallel: bool


@dataclass(frozen=True, slots=True)
class ChatRules:
    """The fields of a request, checked."""

    variables: dict[str, Any]  # what the template gets in addition to messages and tools
    reasoning: ReasoningRules
    calls: CallRules

    @property
    def parsed(self) -> bool:
        """True if the answer must be parsed: it may hold calls, or reasoning that is to be separated."""
        return bool(self.calls.tools) or self.reasoning.separated

    def call_grammar(self, style: AnswerStyle, prefix: str) -> tuple[str, Lark] | None:
        """Return the field that constrains the calls of the answer, and the grammar; None if nothing does."""
        calls = self.calls
        if not calls.forced and not calls.strict:
            return None
        grammars, thought = self._grammars(style), style.thought(prefix)
        if calls.forced:
            return "tool_choice", grammars.forced(calls.forced, thought, calls.parallel and not calls.named)
        grammar = grammars.triggered(calls.tools, calls.strict, thought)
        return None if grammar is None else ("tools", grammar)

    def calls_or_json(self, style: AnswerStyle, prefix: str, schema: str) -> Lark:
        """Return a grammar for calls of the tools, or JSON that `schema` accepts. Only for formats with a marker."""
        grammars, thought, calls = self._grammars(style), style.thought(prefix), self.calls
        return grammars.or_json(calls.tools, calls.strict, schema, thought, calls.parallel)

    def _grammars(self, style: AnswerStyle) -> CallGrammars:
        assert style.calls is not None
        return CallGrammars(style.calls, style.think if self.reasoning.expected else None, style.special)


def check_chat(request: ChatRequest, style: AnswerStyle) -> ChatRules:
    """Return the rules of a request. Raises InvalidRequest, which names the field."""
    declared = check_chat_fields(request.tools, request.messages)
    choice, functions = chosen_tools(request.tool_choice, declared, request.tools, style.call_support)
    known = template_tools(functions)
    reasons = style.template is not None and style.template.reasons
    hidden = request.reasoning is not None and request.reasoning.exclude
    hidden = hidden or (request.thinking is not None and request.thinking.display == "omitted")
    return ChatRules(
        template_variables(
            request.chat_template_kwargs,
            request.reasoning_effort,
            style.template_variables,
            request.reasoning,
            request.thinking,
        ),
        ReasoningRules(
            separated=reasons and request.separate_reasoning is not False,
            shown=request.include_reasoning is not False and not hidden,
            streamed=request.stream_reasoning is not False,
            budget=asked_budget(request, style),
        ),
        CallRules(
            tools=known,
            forced=[tool for tool in known if choice == "required" or choice == _name(tool)],
            named=choice not in ("none", "auto", "required"),
            strict=frozenset(each.name for each in functions if each.strict),
            parallel=request.parallel_tool_calls is not False,
        ),
    )


def check_chat_fields(tools: Sequence[Tool] | None, messages: Sequence[Message]) -> list[Function]:
    """Check the bounds of tools and of the calls in messages; return the functions. Raises InvalidRequest."""
    functions = check_tools(tools or ())
    for index, message in enumerate(messages):
        check_calls(message.tool_calls or (), f"messages[{index}].tool_calls")
    return functions


def bounded_chat(request: ChatRequest) -> ChatRequest:
    """Return a request of a large body as `compact_chat` does, once its tools and calls are within their bounds.

    Raises InvalidRequest.
    """
    check_chat_fields(request.tools, request.messages)
    return compact_chat(request)


def chosen_tools(
    given: str | ChatToolChoice | None,
    declared: Sequence[Function],
    tools: Sequence[Tool] | None,
    support: CallSupport,
) -> tuple[str, Sequence[Function]]:
    """Return the choice and the functions that the prompt shows. Raises InvalidRequest.

    The choice is none, auto, required, or `function NAME` for a function that must be called.

    Args:
        given: `tool_choice` as the client sent it.
        declared: the functions of `tools`.
    """
    choice, functions = _tool_choice(given, declared)
    _check_choice(choice, functions, tools or (), support)
    if not functions or choice == "none":
        return choice, ()
    if not support.read:
        raise InvalidRequest(
            "the format in which this model calls tools is not known; leave tools out, send tool_choice none, or "
            "set model.response_template",
            param="tools",
        )
    return choice, functions


def _tool_choice(
    given: str | ChatToolChoice | None, functions: Sequence[Function]
) -> tuple[str, Sequence[Function]]:
    """Return the choice and the functions that it leaves."""
    if isinstance(given, ChatToolChoice):
        if given.type == "allowed_tools" and given.allowed_tools is not None:
            return given.allowed_tools.mode, allowed_functions(given.allowed_tools, functions)
        if given.type == "allowed_tools":
            field = "tool_choice.allowed_tools"
            raise InvalidRequest(f"{field} is missing", param=field)
        return f"function {chosen_name(given.type, given.function, functions, 'tool_choice')}", functions
    if given not in (None, "auto", "none", "required"):
        raise InvalidRequest(
            "tool_choice must be none, auto, required, or an object that names a function or allowed_tools",
            param="tool_choice",
        )
    if given == "required" and not functions:
        raise InvalidRequest("tool_choice forces a call, but there are no tools", param="tool_choice")
    return given or "auto", functions


def _check_choice(
    choice: str, functions: Sequence[Function], tools: Sequence[Tool], support: CallSupport
) -> None:
    """Raise InvalidRequest for what the model's format of calls cannot enforce."""
    if choice not in ("none", "auto") and not support.forced:
        raise InvalidRequest(
            "tool_choice can force a call only of a model whose format of calls is known; send auto",
            param="tool_choice",
        )
    if choice == "auto" and not support.told_apart:
        strict = {function.name for function in functions if function.strict}
        for index, tool in enumerate(tools):
            if tool.function is not None and tool.function.name in strict:
                where = f"tools[{index}].function.strict"
                raise InvalidRequest(
                    f"{where}: this model marks no calls, so that only tool_choice required or a named function can "
                    "enforce a schema; leave strict out",
                    param=where,
                )


def _name(tool: dict[str, Any]) -> str:
    return f"function {tool['function']['name']}"
