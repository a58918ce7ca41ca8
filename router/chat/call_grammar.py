"""Writes grammars that force tool calls in the model's own format: for tool_choice required or named, and strict tools.

A grammar is a text in llguidance's dialect of Lark that refers to JSON schemas by names. It is written here and
compiled in a text worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from router.chat.call_formats import CallFormat
from router.grammar.lark import ANY_TEXT, quoted

ANY_OBJECT: dict[str, Any] = {"type": "object"}
# The schema of a function that is declared without parameters, as at OpenAI: exactly {}.
NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_BLANKS = r"/[ \n]{0,4}/"


class Thought(Enum):
    """The place of the answer's message when the model begins to write."""

    NONE = auto()  # past its reasoning, or the model does not reason
    POSSIBLE = auto()  # it may begin with a reasoning section
    OPEN = auto()  # inside a reasoning section that the prompt opens


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A Lark text and the JSON texts of the schemas that it names as @name."""

    lark: str
    schemas: dict[str, str]


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
        self._special = dict(special)
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")

    def forced(self, tools: Sequence[dict[str, Any]], thought: Thought, several: bool) -> CallGrammar:
        """Return a grammar whose texts are a call of one of the tools; with `several`, one call or more."""
        rules, schemas = list[str](), dict[str, str]()
        names = [
            self._call(index, tool["function"], True, rules, schemas) for index, tool in enumerate(tools)
        ]
        start = _sequence(self._thought(thought, rules), self._listed(self._calls.opening, several))
        return _grammar([f"start: {start}", f"call: {' | '.join(names)}", *rules], schemas)

    def or_json(
        self,
        tools: Sequence[dict[str, Any]],
        strict: frozenset[str],
        schema: str,
        thought: Thought,
        several: bool,
    ) -> CallGrammar:
        """Return a grammar whose texts are calls as in `forced`, or JSON that `schema` accepts.

        The arguments of the tools in `strict` have their schema. The format of calls must have a marker: llguidance's
        lexer cannot choose between JSON and a call that begins like it.
        """
        assert self._calls.trigger is not None
        rules, schemas = list[str](), {"answer": schema}
        names = [
            self._call(index, tool["function"], tool["function"]["name"] in strict, rules, schemas)
            for index, tool in enumerate(tools)
        ]
        either = f"({self._listed(self._calls.opening, several)} | @answer)"
        start = _sequence(self._thought(thought, rules), either)
        return _grammar([f"start: {start}", f"call: {' | '.join(names)}", *rules], schemas)

    def triggered(
        self, tools: Sequence[dict[str, Any]], strict: frozenset[str], thought: Thought
    ) -> CallGrammar | None:
        """Return a grammar of any text with calls, in which the arguments of the tools in `strict` have their schema.

        None if nothing tells calls from text.
        """
        form = self._calls
        if form.lookalike:
            return self._beginning(tools, strict, thought)
        if form.trigger is None:
            return None
        rules, schemas = list[str](), dict[str, str]()
        names = [
            self._call(
                index, tool["function"], tool["function"]["name"] in strict, rules, schemas, form.trigger
            )
            for index, tool in enumerate(tools)
        ]
        rest = self._listed(form.opening.removeprefix(form.trigger), several=bool(form.opening))
        rules.append(f"piece: {_sequence(self._until('begin', form.trigger, rules), rest)}")
        start = _sequence(self._thought(thought, rules), f"piece* {ANY_TEXT}")
        return _grammar([f"start: {start}", f"call: {' | '.join(names)}", *rules], schemas)

    def _beginning(
        self, tools: Sequence[dict[str, Any]], strict: frozenset[str], thought: Thought
    ) -> CallGrammar:
        """Write what `triggered` does for a format whose calls begin the answer or follow `marker`.

        The other texts are those that do not begin like a call. llguidance's lexer prefers the longest match, so the
        blanks before a call and its beginning are one match.
        """
        form, rules, schemas = self._calls, list[str](), dict[str, str]()
        names = []
        for index, tool in enumerate(tools):
            function = tool["function"]
            begin = re.escape(form.begin.replace("{name}", function["name"])).replace("/", r"\/")
            rules.append(f"begin_{index}: /[ \\n]{{0,4}}{begin}/")
            schemas[f"args_{index}"] = _arguments(function, function["name"] in strict)
            end = self._literal(form.end)
            names.append(f"begin_{index} @args_{index} {end}")
        spelled_out = f"/(?s:.*){re.escape(form.marker)}(?s:.*)/"
        rules += [
            f"OTHER: {ANY_TEXT} & ~/{form.lookalike}(?s:.*)/ & ~{spelled_out}",
            f"call: {' | '.join(names)}",
        ]
        marker = self._literal(form.marker)
        # The lexer could not tell where the text before a marker ends if the marker is not a special token.
        parts = f"part? ({marker} part)*" if form.marker in self._special else f"{marker}? part?"
        rules.append(f"part: OTHER | call ({self._literal(form.between)} call)*")
        start = _sequence(self._thought(thought, rules), parts)
        return _grammar([f"start: {start}", *rules], schemas)

    def _listed(self, opening: str, several: bool) -> str:
        again = f"({_sequence(self._literal(self._calls.between), 'call')})*" if several else ""
        return _sequence(self._literal(opening), "call", again, self._literal(self._calls.closing))

    def _call(
        self,
        index: int,
        function: Mapping[str, Any],
        typed: bool,
        rules: list[str],
        schemas: dict[str, str],
        skip: str = "",
    ) -> str:
        """Add the rules of the calls of one tool, without their beginning `skip`. Return the name of the rule."""
        form = self._calls
        begin = form.begin.replace("{name}", function["name"]).removeprefix(skip)
        end = self._literal(form.end)
        if form.argument is None:
            schemas[f"args_{index}"] = _arguments(function, typed)
            arguments = f"@args_{index}"
        elif typed:
            arguments = self._tags(index, function.get("parameters") or {}, rules, schemas)
        else:
            arguments, end = self._until(f"args_{index}", form.end, rules), ""
        rules.append(f"call_{index}: {_sequence(self._literal(begin), arguments, end)}")
        return f"call_{index}"

    def _tags(
        self, index: int, parameters: Mapping[str, Any], rules: list[str], schemas: dict[str, str]
    ) -> str:
        """Return the rule of one tag for each argument, in the order of the schema."""
        assert self._calls.argument is not None
        before, after = self._calls.argument
        properties = parameters.get("properties")
        required = parameters.get("required")
        found = []
        for number, (key, schema) in enumerate(properties.items() if isinstance(properties, dict) else ()):
            name = f"value_{index}_{number}"
            if _is_text(schema):
                value = self._until(name, after, rules)
            else:
                schemas[name] = json.dumps(schema)
                value = _sequence(f"@{name}", self._literal(after))
            tag = _sequence(self._literal(before.replace("{key}", key)), value)
            needed = isinstance(required, list) and key in required
            found.append(tag if needed else f"({tag})?")
        return " ".join(found)

    def _until(self, rule: str, end: str, rules: list[str]) -> str:
        """Return the rule of any text up to and including `end`."""
        special = self._special.get(end)
        if special is not None:
            return f"{ANY_TEXT} <[{special}]>"
        rules.append(f"{rule}[suffix={json.dumps(end)}]: {ANY_TEXT}")
        return rule

    def _thought(self, thought: Thought, rules: list[str]) -> str:
        if self._think is None or thought is Thought.NONE:
            return ""
        begin, end = self._think
        inside = _sequence(self._until("thought", end, rules), _BLANKS)
        if thought is Thought.OPEN:
            return inside
        # Blanks come before either, so that a model which begins with one is not forced to reason.
        return f"{_BLANKS} ({_sequence(self._literal(begin), inside)})?"

    def _literal(self, text: str) -> str:
        """Return the rule of exactly this text; special tokens in it by their ids."""
        parts, start = list[str](), 0
        for match in self._pattern.finditer(text):
            parts += [quoted(text[start : match.start()]), f"<[{self._special[match[0]]}]>"]
            start = match.end()
        return _sequence(*parts, quoted(text[start:]))


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


def _grammar(lines: list[str], schemas: dict[str, str]) -> CallGrammar:
    return CallGrammar("\n".join(lines), schemas)


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)
