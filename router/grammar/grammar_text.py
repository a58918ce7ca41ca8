"""Writes constraints as grammars of llguidance. The cost depends on the client: only for text workers and tests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher

from common.errors import InvalidGrammar
from router.grammar.constraint import Constraint, Ebnf, End, JsonSchema, OneOf, Regex
from router.grammar.ebnf import lark_of
from router.grammar.lark import Lark, LarkWriter
from router.grammar.structural_tags import Tags, tags_grammar

_dumps = partial(json.dumps, ensure_ascii=False)
# Strings, comments and regular expressions of Lark.
_LITERALS = r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/'
# Whitespace between the tokens of JSON unless a request says otherwise: what printed JSON has, and bounded, because a
# small model may write newlines until max_tokens.
WHITESPACE = r"[ \t]?(\r?\n[ \t]{0,24})?"
_LAYOUT_OPTIONS = {"whitespace_flexible", "whitespace_pattern"}
ANSWER = "constrained_answer"  # name of the grammar that follows free text


def grammar_text(constraint: Constraint, special: Mapping[str, int] = MappingProxyType({})) -> str:
    """Return the grammar of a constraint. It may not compile. Raises InvalidGrammar with the field.

    `special`: ids of the special tokens that structural tags or a grammar in Lark name.
    """
    try:
        form = constraint.form
        if isinstance(form, Tags):
            form = tags_grammar(form, special)
        elif isinstance(form, Lark):
            form = Lark(_with_ids(form.text, special), form.schemas, form.compact)
        text = _text(form)
        if constraint.after is not None:
            text = _after(constraint.after, text)
        text.encode()  # lone surrogates are not text
        return text
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(
            f"{constraint.field} cannot be read: {str(error)[:500]}", param=constraint.field
        ) from error


def _text(form: JsonSchema | Regex | OneOf | Lark | Ebnf) -> str:
    match form:
        case JsonSchema():
            schema = _closed(_parsed(form.schema)) if form.closed else _parsed(form.schema)
            return _dumps({"grammars": [{"json_schema": _with_layout(schema, form)}]})
        case Regex():
            return LLMatcher.grammar_from_regex(form.pattern)
        case OneOf():
            # Lark's strings have the escapes of JSON.
            return "start: " + " | ".join(_dumps(option) for option in form.options)
        case Lark():
            layout = JsonSchema("", any_whitespace=not form.compact)
            named = [
                {"name": name, "json_schema": _with_layout(_parsed(schema), layout)}
                for name, schema in form.schemas.items()
            ]
            return _dumps({"grammars": [{"lark_grammar": form.text}, *named]}) if named else form.text
        case Ebnf():
            return lark_of(form.text)


def _with_ids(lark: str, special: Mapping[str, int]) -> str:
    """Name special tokens by their ids, <[5]> instead of <|user|>: llguidance knows them under other names."""
    names = [name for name in special if name.startswith("<") and name.endswith(">")]
    if not names:
        return lark
    pattern = f"({_LITERALS})|({'|'.join(map(re.escape, names))})"
    return re.sub(pattern, lambda match: match[1] or f"<[{special[match[2]]}]>", lark)


def _parsed(schema: str) -> Any:
    """Parse with the standard library, which keeps integers of any size."""
    parsed = json.loads(schema)
    if not isinstance(parsed, dict | bool):
        raise ValueError("a schema must be a JSON object")
    return parsed if isinstance(parsed, dict) else ({} if parsed else {"not": {}})


def _with_layout(schema: dict[str, Any], form: JsonSchema) -> dict[str, Any]:
    """Set llguidance's options for whitespace, over those that the schema itself may have."""
    options: dict[str, Any] = {}
    if not form.any_whitespace:
        options["whitespace_flexible"] = False
    if form.whitespace_pattern is not None:
        options["whitespace_pattern"] = form.whitespace_pattern
    given = schema.get("x-guidance")
    merged = {**(given if isinstance(given, dict) else {}), **options}
    if not _LAYOUT_OPTIONS & merged.keys():
        merged["whitespace_pattern"] = WHITESPACE
    return {**schema, "x-guidance": merged}


def _closed(value: Any) -> Any:
    """Forbid properties that an object's schema does not name."""
    if isinstance(value, list):
        return [_closed(each) for each in value]
    if not isinstance(value, dict):
        return value
    inner = {name: _closed(each) for name, each in value.items()}
    if "properties" in inner or "patternProperties" in inner:
        inner["additionalProperties"] = False
    return inner


def _after(end: End, grammar: str) -> str:
    """Return a grammar of free text up to `end`, then `grammar`."""
    lark = LarkWriter(end.special)
    start = lark.finished(f"{lark.reasoning(end.text, end.begin)} @{ANSWER}").text
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return _dumps({"grammars": [{"lark_grammar": start}, {**parts[0], "name": ANSWER}, *parts[1:]]})
