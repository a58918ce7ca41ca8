"""Answers in the format of each family, and what they mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from router.chat.answer_events import CallArguments, CallOpened, Content, Event, Reasoning
from router.chat.answer_parser import AnswerParser
from router.chat.families import BY_NAME
from router.chat.response_template import ResponseTemplate, compile_template

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "places": {"type": "array"},
            },
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]


@dataclass(frozen=True)
class Meaning:
    """What an answer says."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


PARIS = ("weather", '{"city": "Paris", "days": 3}')
NOW = ("clock", "{}")
THOUGHT = "<think>\nThey want {the} weather.\n</think>\n\n"
OBJECT_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
# family, answer, meaning: well-formed answers
WELL_FORMED: list[tuple[str, str, Meaning]] = [
    ("qwen2_5", "Let me look.\n" + OBJECT_CALLS, Meaning("Let me look.", "", (PARIS, NOW))),
    (
        "qwen3",
        THOUGHT + "Let me look.\n" + OBJECT_CALLS,
        Meaning("Let me look.", "They want {the} weather.", (PARIS, NOW)),
    ),
    ("qwen3", THOUGHT + "It rains.", Meaning("It rains.", "They want {the} weather.")),
    (
        "qwen3_5",
        THOUGHT
        + "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        Meaning("", "They want {the} weather.", (PARIS, NOW)),
    ),
    (
        "glm4_5",
        "\n"
        + THOUGHT
        + "Let me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        Meaning("Let me look.", "They want {the} weather.", (PARIS, NOW)),
    ),
    (
        "llama3",
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        Meaning("", "", (PARIS,)),
    ),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        Meaning("", "", (PARIS,)),
    ),
    (
        "mistral_v3",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "clock", "arguments": {}}]',
        Meaning("", "", (PARIS, NOW)),
    ),
    (
        "mistral_v11",
        'Let me look.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]clock[ARGS]{}',
        Meaning("Let me look.", "", (PARIS, NOW)),
    ),
    ("think", THOUGHT + "It rains.", Meaning("It rains.", "They want {the} weather.")),
]


@cache
def template_of(family: str) -> ResponseTemplate:
    found = BY_NAME[family]
    return compile_template(dict(found.template), family, True, found.tag_end)


def parser_of(
    template: ResponseTemplate,
    prefix: str = "",
    tools: Sequence[dict[str, Any]] = tuple(TOOLS),
    reasoning: bool = True,
) -> AnswerParser:
    numbers = itertools.count()
    return AnswerParser(template, prefix, list(tools), reasoning, lambda: f"call_{next(numbers)}")


def events_of(parser: AnswerParser, text: str, size: int) -> list[Event]:
    """Parse a text in pieces of `size` characters."""
    pieces = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return [event for piece in [*pieces, parser.finish()] for event in piece]


def meaning_of(events: Sequence[Event]) -> Meaning:
    """Put events together. A call's arguments must follow its opening."""
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallOpened(index, identity, name):
                assert index == len(calls)
                assert identity == f"call_{index}"
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return Meaning(content, reasoning, tuple(calls))


def parse(family: str, text: str, size: int = 1 << 30, prefix: str = "") -> Meaning:
    return meaning_of(events_of(parser_of(template_of(family), prefix), text, size))
