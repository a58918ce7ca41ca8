"""Schemas whose values would have no end are refused where they are, and recursive ones that end are not."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from common.errors import InvalidGrammar
from common.grammar.endless_schemas import check_endings

LOOP = {"$ref": "#/$defs/x"}
DEFINED = {"$defs": {"x": LOOP}}


def node(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": {"$ref": "#"}}, **more}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "#"),
        ({"allOf": [{"$ref": "#"}, {}]}, "#"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "#"),
        ({"oneOf": [{"$ref": "#"}]}, "#"),
        (node(required=["next"]), "#"),
        (node(required=["next"], type=["object"]), "#"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "#"),
        ({"type": "object", "properties": {"a": {"anyOf": [LOOP, {}]}}, **DEFINED}, "#/properties/a/anyOf/0"),
        ({"type": "object", "additionalProperties": LOOP, **DEFINED}, "#/additionalProperties"),
        ({"type": "array", "items": LOOP, **DEFINED}, "#/items"),
    ],
)
def test_what_has_no_end_is_named(schema: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidGrammar, match=re.escape(f"the schema at {where} refers to itself")):
        check_endings([{}, schema])


@pytest.mark.parametrize(
    "schema",
    [
        True,
        DEFINED,
        node(),
        node(required=["next"], type=["object", "null"]),
        {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"anyOf": [{"$ref": "#"}, {"type": "integer"}]},
        node(required=["next"], properties={"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        node(required=["next", "other", 5], properties={"next": {"type": ["object", "null"]}}),
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1},
        {"type": "array", "items": {"$ref": "#"}, "minItems": "1"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#anchor"},
        {"$ref": 5, "anyOf": 5, "required": 5, "properties": [], "type": "object"},
    ],
)
def test_what_ends_is_allowed(schema: Any) -> None:
    check_endings([schema])


def test_long_chains_take_linear_time() -> None:
    """Each of 5,000 parts is known only once the next one is."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    began = time.thread_time()
    check_endings([{"$defs": {**links, "d5000": {}}, "$ref": "#/$defs/d0"}])
    with pytest.raises(InvalidGrammar, match="refers to itself"):
        check_endings([{"$defs": {**links, "d5000": {"$ref": "#/$defs/d0"}}, "$ref": "#/$defs/d0"}])
    assert time.thread_time() - began < 5
