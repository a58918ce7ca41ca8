"""Checks the text of a grammar before llguidance sees it: its form, and what would cost more than llguidance bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import msgspec

from common.errors import InvalidGrammar
from common.grammar.endless_schemas import check_endings
from common.grammar.limits import GrammarLimits
from common.grammar.schema_intersections import check_intersections
from common.messages.generation import MAX_GRAMMAR

MAX_DIGITS = 40  # in a `multipleOf`; llguidance refuses fewer


class GrammarPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One grammar of a text; a Lark grammar refers to the others as `@name`."""

    name: str | None = None
    json_schema: Any = None
    lark_grammar: str | None = None


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text that `LLMatcher.grammar_from_*` return, unless it is a Lark grammar."""

    grammars: list[GrammarPart]
    max_tokens: None = None


_decoder = msgspec.json.Decoder(Text)


def check_text(text: str, limits: GrammarLimits) -> None:
    """Raise InvalidGrammar for a text that is not a grammar or costs too much to compile."""
    if len(text) > MAX_GRAMMAR:
        raise InvalidGrammar(f"the grammar has {len(text)} characters; the limit is {MAX_GRAMMAR}")
    parts = _parts(text, limits)
    for part in parts:
        if part.lark_grammar is not None and "%json" in part.lark_grammar:
            # A schema inside the text would not be counted below.
            raise InvalidGrammar("%json is not supported in a Lark grammar; send the schema as a JSON schema")
    ampersands = sum((part.lark_grammar or "").count("&") for part in parts)
    if ampersands > limits.max_ampersands:
        raise InvalidGrammar(
            f"the grammar has over {limits.max_ampersands} ampersands; intersect fewer patterns, and write \\x26 in "
            "the others"
        )
    schemas = [part.json_schema for part in parts if part.json_schema is not None]
    check_schemas(schemas, limits)
    check_intersections(schemas, limits)
    check_endings(schemas)


def _parts(text: str, limits: GrammarLimits) -> list[GrammarPart]:
    if not text.lstrip().startswith("{"):  # no Lark grammar does
        return [GrammarPart(lark_grammar=text)]
    try:
        return _decoder.decode(text).grammars
    except RecursionError as error:
        raise InvalidGrammar(f"the schema is nested over {limits.max_depth} levels deep") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidGrammar(f"the grammar cannot be read: {error}") from error


def check_schemas(schemas: list[Any], limits: GrammarLimits) -> None:
    """Raise InvalidGrammar if the schemas together exceed the limits."""
    properties = patterns = 0
    multiples: set[Decimal] = set()
    for values, (value, depth) in enumerate(_walk(schemas), start=1):
        if values > limits.max_values:
            raise InvalidGrammar(f"the schema has over {limits.max_values} values; send a smaller one")
        if depth > limits.max_depth + 1:
            raise InvalidGrammar(f"the schema is nested over {limits.max_depth} levels deep")
        if isinstance(value, Mapping):
            found = value.get("properties")
            properties += len(found) if isinstance(found, Mapping) else 0
            if properties > limits.max_properties:
                raise InvalidGrammar(
                    f"the schema has over {limits.max_properties} properties; send a smaller one"
                )
            found = value.get("patternProperties")
            patterns += len(found) if isinstance(found, Mapping) else 0
            if patterns > limits.max_pattern_properties:
                raise InvalidGrammar(
                    f"the schema has over {limits.max_pattern_properties} patternProperties; send a smaller one"
                )
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                multiples.add(Decimal(repr(multiple)))
    _check_multiples(multiples, limits)


def _check_multiples(multiples: set[Decimal], limits: GrammarLimits) -> None:
    if not multiples:
        return
    shift = max(max(-int(each.as_tuple().exponent) for each in multiples), 0)
    whole = []
    for each in multiples:
        if not each.is_finite() or each <= 0 or each.adjusted() + shift > MAX_DIGITS:
            raise InvalidGrammar(f"multipleOf {each} is not supported; use a positive number of few digits")
        whole.append(int(each.scaleb(shift)))
    if math.lcm(*whole) > limits.max_multiple:
        raise InvalidGrammar(
            f"the least common multiple of all multipleOf, in units of their last decimal, is over "
            f"{limits.max_multiple}; use smaller ones"
        )


def _walk(schemas: list[Any]) -> Iterator[tuple[Any, int]]:
    """Yield every value of the schemas with its depth."""
    waiting: list[tuple[Any, int]] = [(schema, 1) for schema in schemas]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict):
            waiting.extend((each, depth + 1) for each in value.values())
        elif isinstance(value, list):
            waiting.extend((each, depth + 1) for each in value)
