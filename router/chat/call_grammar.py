"""Writes grammars that force tool calls in the model's own format: for tool_choice required or named, and strict tools.

A grammar is a text in llguidance's dialect of Lark that refers to JSON schemas by names. It is written here and
compiled in a text worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from router.chat.call_formats import CallFormat
from router.grammar.lark import ANY_TEXT, Lark, LarkWriter, sequence

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# The schema of a function that is declared without parameters, as at OpenAI: exactly {}.
NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


class Thought(Enum):
    """The part of the message in which the model begins to write."""

    NONE = auto()  # past its reasoning, or the model does not reason
    POSSIBLE = auto()  # it may begin with a reasoning section
    OPEN = auto()  # inside a reasoning section that the prompt opens


class CallGrammars:
    """Writes grammars for one model."""

    def __init__(self, calls: CallFormat, think: tuple[str, str] | None, special: Mapping[str, int]) -> None:
        """
        Args:
            think: the markers that open and close a reasoning section; None for a model without one.
            special: ids of the added tokens that markers consist of, which ordinary text cannot match.
        """
        self._calls = calls
        self._think = think
        self._special = special

    def forced(self, tools: Sequence[dict[str, Any]], thought: Thought, several: bool) -> Lark:
        """Return a grammar whose texts are a call of one of the tools; with `several`, one call or more."""
        lark = LarkWriter(self._special)
        self._add_calls(lark, tools, frozenset(tool["function"]["name"] for tool in tools))
        return self._after_reasoning(lark, thought, self._listed(lark, self._calls.opening, several))

    def or_json(
        self,
        tools: Sequence[dict[str, Any]],
        strict: frozenset[str],
        schema: str,
        thought: Thought,
        several: bool,
    ) -> Lark:
        """Return a grammar whose texts are calls as in `forced`, or JSON that `schema` accepts.

        The arguments of the tools in `strict` have their schema. The format of calls must have a marker: llguidance's
        lexer cannot choose between JSON and a call that begins like it.
        """
        assert self._calls.trigger is not None
        lark = LarkWriter(self._special)
        lark.schemas["answer"] = schema
        self._add_calls(lark, tools, strict)
        calls = self._listed(lark, self._calls.opening, several)
        return self._after_reasoning(lark, thought, f"({calls} | @answer)")

    def triggered(
        self, tools: Sequence[dict[str, Any]], strict: frozenset[str], thought: Thought
    ) -> Lark | None:
        """Return a grammar of any text with calls, in which the arguments of the tools in `strict` have their schema.

        None if nothing tells calls from text.
        """
        form = self._calls
        if form.lookalike:
            return self._beginning(tools, strict, thought)
        if form.trigger is None:
            return None
        lark = LarkWriter(self._special)
        self._add_calls(lark, tools, strict, form.trigger)
        rest = self._listed(lark, form.opening.removeprefix(form.trigger), several=bool(form.opening))
        lark.rules.append(f"piece: {sequence(lark.until(form.trigger, 'begin'), rest)}")
        return self._after_reasoning(lark, thought, f"piece* {ANY_TEXT}")

    def _beginning(self, tools: Sequence[dict[str, Any]], strict: frozenset[str], thought: Thought) -> Lark:
        """Write what `triggered` does for a format whose calls begin the answer or follow `marker`.

        The other texts are those that do not begin like a call. llguidance's lexer prefers the longest match, so the
        blanks before a call and its beginning are one match.
        """
        form, lark, names = self._calls, LarkWriter(self._special), []
        for index, tool in enumerate(tools):
            function = tool["function"]
            begin = re.escape(form.begin.replace("{name}", function["name"])).replace("/", r"\/")
            lark.rules.append(f"begin_{index}: /[ \\n]{{0,4}}{begin}/")
            lark.schemas[f"args_{index}"] = _arguments(function, function["name"] in strict)
            names.append(f"begin_{index} @args_{index} {lark.literal(form.end)}")
        spelled_out = f"/(?s:.*){re.escape(form.marker)}(?s:.*)/"
        lark.rules += [
            f"OTHER: {ANY_TEXT} & ~/{form.lookalike}(?s:.*)/ & ~{spelled_out}",
            f"call: {' | '.join(names)}",
            f"part: OTHER | call ({lark.literal(form.between)} call)*",
        ]
        marker = lark.literal(form.marker)
        # The lexer could not tell where the text before a marker ends if the marker is not a special token.
        parts = f"part? ({marker} part)*" if form.marker in self._special else f"{marker}? part?"
        return self._after_reasoning(lark, thought, parts)

    def _after_reasoning(self, lark: LarkWriter, thought: Thought, answer: str) -> Lark:
        """Return the grammar of an answer, with what may precede it."""
        if self._think is None or thought is Thought.NONE:
            return lark.finished(answer)
        begin, end = self._think
        return lark.finished(
            f"{lark.reasoning(end, begin if thought is Thought.POSSIBLE else None)} {answer}"
        )

    def _listed(self, lark: LarkWriter, opening: str, several: bool) -> str:
        again = f"({sequence(lark.literal(self._calls.between), 'call')})*" if several else ""
        return sequence(lark.literal(opening), "call", again, lark.literal(self._calls.closing))

    def _add_calls(
        self, lark: LarkWriter, tools: Sequence[dict[str, Any]], strict: frozenset[str], skip: str = ""
    ) -> None:
        """Add the rule of a call of one of the tools, without its beginning `skip`."""
        for index, tool in enumerate(tools):
            self._add_call(lark, index, tool["function"], tool["function"]["name"] in strict, skip)
        lark.rules.append(f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}")

    def _add_call(
        self, lark: LarkWriter, index: int, function: Mapping[str, Any], typed: bool, skip: str
    ) -> None:
        form = self._calls
        begin = form.begin.replace("{name}", function["name"]).removeprefix(skip)
        end = lark.literal(form.end)
        if form.argument is None:
            lark.schemas[f"args_{index}"] = _arguments(function, typed)
            arguments = f"@args_{index}"
        elif typed:
            arguments = self._tags(lark, index, function.get("parameters") or {}, form.argument)
        else:
            arguments, end = lark.until(form.end, f"args_{index}"), ""
        lark.rules.append(f"call_{index}: {sequence(lark.literal(begin), arguments, end)}")

    def _tags(
        self, lark: LarkWriter, index: int, parameters: Mapping[str, Any], around: tuple[str, str]
    ) -> str:
        """Return the rule of one tag for each argument, in the order of the schema."""
        before, after = around
        properties = parameters.get("properties")
        required = parameters.get("required")
        found = []
        for number, (key, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            name = f"value_{index}_{number}"
            if _is_text(schema):
                value = lark.until(after, name)
            else:
                lark.schemas[name] = json.dumps(schema)
                value = sequence(f"@{name}", lark.literal(after))
            tag = sequence(lark.literal(before.replace("{key}", key)), value)
            needed = isinstance(required, list) and key in required
            found.append(tag if needed else f"({tag})?")
        return " ".join(found)


def _arguments(function: Mapping[str, Any], typed: bool) -> str:
    """Return the schema of a call's arguments; `typed`: it is the declared one."""
    if not typed:
        return json.dumps(ANY_OBJECT)
    declared = function.get("parameters")
    return json.dumps(NO_ARGUMENTS if declared is None else declared or ANY_OBJECT)


def _is_text(schema: Any) -> bool:
    """Return whether a tag holds the value as plain text: a string of any content."""
    if not isinstance(schema, dict):
        return True
    return schema.get("type") == "string" and not {"enum", "const", "pattern", "format"} & schema.keys()
