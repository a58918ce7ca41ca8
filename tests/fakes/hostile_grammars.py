"""Constraints that are made to cost too much: each has to be refused soon, or to compile within the limits."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def nested(depth: int) -> Fields:
    schema: Fields = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def repeated(text: str, counts: tuple[int, ...]) -> str:
    """Nest bounded repetitions, which multiply."""
    for count in counts:
        text = f"({text}){{{count}}}"
    return text


PATTERNS = [{"type": "string", "pattern": f"a.*{i}"} for i in range(40)]


def _schemas() -> dict[str, Any]:
    objects = [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(400)]
    return {
        "4,000 properties": {"properties": {f"p{i}": {} for i in range(4000)}},
        "513 optional properties": {"properties": {f"p{i}": {"type": "string"} for i in range(513)}},
        "512 optional properties": {"properties": {f"p{i}": {"type": "string"} for i in range(512)}},
        "nested 100 deep": nested(100),
        "nested 20,000 deep": '{"items":' * 20_000 + "{}" + "}" * 20_000,
        "enum of 100,000": {"enum": list(range(100_000))},
        "enum of 19,000": {"enum": [f"{i:x}" for i in range(19_000)]},
        "anyOf of 5,000": {"anyOf": [{"const": i} for i in range(5000)]},
        "anyOf of objects": {"anyOf": objects},
        "oneOf of objects": {"oneOf": objects},
        "allOf of 400 objects": {"allOf": objects},
        "allOf of 2,000 ranges": {"allOf": [{"type": "integer", "minimum": i} for i in range(2000)]},
        "allOf of 40 patterns": {"allOf": PATTERNS},
        "allOf of 12 patterns": {"allOf": PATTERNS[:12]},
        "allOf of patterns of a property": {"allOf": [{"properties": {"a": each}} for each in PATTERNS]},
        "a chain of references with patterns": {
            "$defs": {f"d{i}": {**each, "$ref": f"#/$defs/d{i + 1}"} for i, each in enumerate(PATTERNS)}
            | {f"d{len(PATTERNS)}": {"type": "string"}},
            "$ref": "#/$defs/d0",
        },
        "anchors with patterns": {
            "$defs": {
                f"d{i}": {**each, "$anchor": f"d{i}", "$ref": f"#d{i + 1}"} for i, each in enumerate(PATTERNS)
            }
            | {"end": {"$anchor": f"d{len(PATTERNS)}"}},
            "$ref": "#d0",
        },
        "a long enum with a pattern": {
            "enum": [f"a{i}b" for i in range(9000)],
            "type": "string",
            "pattern": "^a(1|2)*.*b$",
        },
        "400 patternProperties": {"patternProperties": {f"^x{i:03}_.*y": {} for i in range(400)}},
        "a reference to itself": {"$ref": "#"},
        "references in a circle": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "allOf with itself": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"},
        "anyOf doubling": {
            "$defs": {
                f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}] * 2}
                for i in range(40)
            }
            | {"d40": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        "allOf doubling": {
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        "a remote reference": {"$ref": "https://example.com/schema.json"},
        "multipleOf a large prime": {"type": "integer", "multipleOf": 999_983},
        "multipleOf with a large multiple": {"allOf": [{"multipleOf": 97}, {"multipleOf": 89}]},
        "minLength of a thousand million": {"type": "string", "minLength": 10**9},
        "maxLength of a thousand million": {"type": "string", "maxLength": 10**9},
        "maxLength of 10 ** 30": {"type": "string", "maxLength": 10**30},
        "minItems of a thousand million": {"type": "array", "minItems": 10**9},
        "maxItems of a million": {"type": "array", "maxItems": 10**6, "items": {"type": "integer"}},
        "minProperties of a million": {"type": "object", "minProperties": 10**6},
        "a long range of integers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        "a long range of numbers": {"type": "number", "minimum": -1.5e300, "maximum": 1.5e300},
        "a pattern of nested repetitions": {"type": "string", "pattern": repeated("ab", (50, 50, 50))},
        "an exponential pattern": {"type": "string", "pattern": "(x+x+)+y"},
        "the tail of a pattern": {"type": "string", "pattern": "a.{900}b"},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "not": {"not": {"type": "null"}},
        "bounds that cross": {"type": "integer", "minimum": 5, "maximum": 4},
        "keywords of wrong types": {"type": 5, "properties": [], "required": "a", "enum": {}, "items": 3},
        "negative lengths": {"type": "string", "minLength": -1, "maxLength": -5},
    }


def _texts() -> dict[str, Fields]:
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"'
    return {
        "nested repetitions": {"regex": repeated("a", (100, 100, 100))},
        "large optional repetitions": {"regex": "(a?){30000}b"},
        "unions of repetitions": {"regex": "|".join(f"(a{{{i}}}b)+" for i in range(1, 300))},
        "the tail of a regex": {"regex": "(a|b)*a(a|b){18}"},
        "look-around": {"regex": "(?=a)b"},
        "a back reference": {"regex": r"(a)\1"},
        "deep groups": {"regex": "(" * 5000 + ")" * 5000},
        "classes of all letters": {"regex": r"(\p{L}{1,200}\s){1,200}"},
        "4,000 choices": {"structured_outputs": {"choice": [f"choice {i}" * 3 for i in range(4000)]}},
        "an empty choice": {"structured_outputs": {"choice": [""]}},
        "rules that double": {"structured_outputs": {"grammar": f"start: r0\n{rules}"}},
        "left recursion": {"structured_outputs": {"grammar": 'start: start start | "a" | '}},
        "only itself": {"structured_outputs": {"grammar": "start: start"}},
        "a repetition of a million": {"structured_outputs": {"grammar": 'start: "a"{1000000}'}},
        "nested repetitions of rules": {
            "structured_outputs": {"grammar": 'start: a{1000}\na: b{1000}\nb: "c"{1000}'}
        },
        "20,000 rules": {
            "structured_outputs": {"grammar": "start: r1\n" + "\n".join(f'r{i}: "{i}"' for i in range(9000))}
        },
        "an intersection of 24 patterns": {
            "structured_outputs": {
                "grammar": "start: T\nT: " + " & ".join(f"/(?s:.*)a.*{i}.*/" for i in range(24))
            }
        },
        "a schema in Lark": {"structured_outputs": {"grammar": 'start: %json {"type": "string"}'}},
        "deep parentheses of Lark": {"structured_outputs": {"grammar": "start: " + "(" * 9000 + ")" * 9000}},
        "deep parentheses of EBNF": {"ebnf": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
        "EBNF without a root": {"ebnf": 'a ::= "b"'},
        "half of a character": {"regex": "\ud800"},
        "a NUL": {"regex": "a\0b"},
    }


HOSTILE: dict[str, Fields] = {name: {"json_schema": schema} for name, schema in _schemas().items()} | _texts()
