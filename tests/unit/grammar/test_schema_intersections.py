"""Schemas that intersect patterns: llguidance would need hours and all memory for the ones that are refused here."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from common.errors import InvalidGrammar
from common.grammar.limits import GrammarLimits
from common.grammar.schema_intersections import check_intersections

PATTERNS = [{"type": "string", "pattern": f"a.*{i}"} for i in range(13)]
ENUM = [f"a{i}" for i in range(1001)]


def chain(**more: Any) -> dict[str, Any]:
    """Return schemas that refer to each other, with a pattern each."""
    links = {f"d{i}": {**each, "$ref": f"#/$defs/d{i + 1}"} for i, each in enumerate(PATTERNS)}
    return {"$defs": {**links, "d13": {"type": "string"}}, "$ref": "#/$defs/d0", **more}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"allOf": PATTERNS}, "over 12 patterns"),
        ({"allOf": [{"properties": {"a": each}} for each in PATTERNS]}, "over 12 patterns"),
        ({"allOf": [{"items": {"items": each}} for each in PATTERNS]}, "over 12 patterns"),
        ({"allOf": [{"prefixItems": [each]} for each in PATTERNS]}, "over 12 patterns"),
        ({"properties": {"a": {"items": {"allOf": PATTERNS}}}}, "over 12 patterns"),
        ({"items": [{}], "additionalItems": {"allOf": PATTERNS}}, "over 12 patterns"),
        ({"allOf": [{"allOf": PATTERNS[:7]}, {"anyOf": [{}, {"allOf": PATTERNS[7:]}]}]}, "over 12 patterns"),
        ({"allOf": PATTERNS[:12], "maxLength": 5}, "over 12 patterns"),
        ({"allOf": PATTERNS[:12], "format": "date"}, "over 12 patterns"),
        (chain(), "over 12 patterns"),
        ({"$defs": {"a~/b": {"allOf": PATTERNS}}, "$ref": "#/$defs/a~0~1b"}, "over 12 patterns"),
        ({"anyOf": [{"$ref": "#/$defs/0"}], "$defs": [{"allOf": PATTERNS}]}, "over 12 patterns"),
        ({"$ref": "#there", "$defs": {"x": {"$anchor": "there", "anyOf": PATTERNS}}}, "over 12 patterns"),
        ({"allOf": [{"$ref": "https://a/b"}, {}], "$defs": {"x": {"anyOf": PATTERNS}}}, "over 12 patterns"),
        # b is first met below a, when the bound of a is not known yet
        (
            {
                "$defs": {
                    "a": {"allOf": PATTERNS[:7], "properties": {"b": {"$ref": "#/$defs/b"}}},
                    "b": {"items": {"$ref": "#/$defs/a"}},
                },
                "properties": {
                    "x": {"$ref": "#/$defs/a"},
                    "y": {"allOf": [{"$ref": "#/$defs/b"}, *PATTERNS[7:]]},
                },
            },
            "over 12 patterns",
        ),
        (
            {
                "$defs": {"a": {"pattern": "a", "items": {"$ref": "#/$defs/a", "format": "date"}}},
                "$ref": "#/$defs/a",
            },
            "over 12 patterns",
        ),
        ({"enum": ENUM, "pattern": "a"}, "over 1000 values"),
        ({"allOf": [{"enum": ENUM}, {"maxLength": 9}]}, "over 1000 values"),
        ({"$ref": "#/$defs/x", "format": "date", "$defs": {"x": {"enum": ENUM}}}, "over 1000 values"),
    ],
)
def test_too_much_meets_in_one_text(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidGrammar, match=words):
        check_intersections([{}, schema], GrammarLimits())


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"allOf": PATTERNS[:12]},
        {"anyOf": PATTERNS, "type": "string"},
        {"properties": {f"p{i}": each for i, each in enumerate(PATTERNS)}},
        {"prefixItems": PATTERNS},
        {"properties": {"a": {"enum": ENUM}, "b": PATTERNS[0]}},
        {"$defs": {"x": {"enum": ENUM}}, "items": {"$ref": "#/$defs/x", "description": "a name"}},
        {
            "$defs": {"n": {"pattern": "a", "items": {"$ref": "#/$defs/n"}}},
            "allOf": [{"$ref": "#/$defs/n"}] * 2,
        },
        # enum and pattern of different properties do not meet
        {"allOf": [{"properties": {"a": {"enum": ENUM}}}, {"properties": {"b": PATTERNS[0]}}]},
        {"allOf": [{"properties": {f"p{i}": each}} for i, each in enumerate(PATTERNS)]},
        {"$ref": "#/nowhere/at/all"},
        {"allOf": 5, "properties": [], "enum": {}, "prefixItems": None, "$ref": 7},
    ],
)
def test_ordinary_schemas_pass(schema: Any) -> None:
    check_intersections([schema], GrammarLimits())


BASE = {"properties": {"name": {"type": "string", "pattern": "^[a-z]+$"}}}


def inherited(**fields: Any) -> dict[str, Any]:
    """Return a schema with the properties of `Base` and others."""
    return {"allOf": [{"$ref": "#/$defs/Base"}, {"type": "object", "properties": fields}]}


@pytest.mark.parametrize(
    "definitions",
    [
        {"Node": inherited(children={"type": "array", "items": {"$ref": "#/$defs/Node"}})},
        {"Node": inherited(next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})},
        {
            "Node": inherited(owner={"$ref": "#/$defs/Owner"}, made={"format": "date"}),
            "Owner": inherited(nodes={"additionalProperties": {"$ref": "#/$defs/Node"}}),
        },
    ],
    ids=["tree", "list", "mutual"],
)
def test_recursive_schemas_inherit_properties(definitions: dict[str, Any]) -> None:
    """Different properties are different texts: no bound grows from pass to pass."""
    check_intersections(
        [{"$defs": {"Base": BASE, **definitions}, "$ref": "#/$defs/Node"}], GrammarLimits(max_intersected=1)
    )


@pytest.mark.parametrize(
    "other",
    [
        BASE,
        {"additionalProperties": {"format": "date"}},
        {"patternProperties": {"^n": {"maxLength": 3}}},
        {"anyOf": [{}, {"additionalProperties": {"$ref": "#/$defs/Base/properties/name"}}]},
    ],
)
def test_parts_meet_in_a_property_that_both_constrain(other: dict[str, Any]) -> None:
    schema = {"$defs": {"Base": BASE}, "allOf": [{"$ref": "#/$defs/Base"}, other]}
    check_intersections([schema], GrammarLimits(max_intersected=2))
    with pytest.raises(InvalidGrammar, match="over 1 patterns"):
        check_intersections([schema], GrammarLimits(max_intersected=1))


def test_a_recursive_property_that_two_parts_constrain_is_refused() -> None:
    """Each level adds the pattern of the part that is not recursive."""
    node = inherited(name={"$ref": "#/$defs/Node"})
    with pytest.raises(InvalidGrammar, match="over 12 patterns"):
        check_intersections(
            [{"$defs": {"Base": BASE, "Node": node}, "$ref": "#/$defs/Node"}], GrammarLimits()
        )


def test_the_work_of_combining_properties_is_bounded() -> None:
    wide = {"properties": {f"p{i}": PATTERNS[0] for i in range(500)}}
    twice = {"allOf": [{"$ref": "#/$defs/wide"}] * 2}
    schema = {"$defs": {"wide": wide}, "prefixItems": [deepcopy(twice) for _ in range(150)]}
    with pytest.raises(InvalidGrammar, match="too many properties"):
        check_intersections([schema], GrammarLimits())


def test_a_long_chain_of_references_is_refused() -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    with pytest.raises(InvalidGrammar, match="too long a chain"):
        check_intersections([{"$defs": links, "$ref": "#/$defs/d0"}], GrammarLimits())


def syntax_tree(size: int) -> dict[str, Any]:
    """Return a schema in which each definition contains all the others."""
    everything = {"anyOf": [{"$ref": f"#/$defs/d{n}"} for n in range(size)]}
    part = {"properties": {"name": {"pattern": "a"}, "parts": {"items": everything}}}
    return {"$defs": {f"d{n}": deepcopy(part) for n in range(size)}, **everything}


def test_definitions_that_refer_to_each_other_are_checked_in_a_few_passes() -> None:
    check_intersections([syntax_tree(40)], GrammarLimits(max_values=20_000))
    with pytest.raises(InvalidGrammar, match="too many cycles"):
        check_intersections([syntax_tree(40)], GrammarLimits(max_values=2000))
