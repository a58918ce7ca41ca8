"""Random constraints with short answers: JSON schemas, regular expressions, and grammars in Lark and EBNF.

The same seed always gives the same constraint, and each comes with what decides whether an answer satisfies it, which
knows nothing of llguidance: a validator of JSON schemas, or Python's regular expressions.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]
WORDS = ("red", "green", "blue", "apples", "n/a", "x y", 'say "hi"', "café", "日本", "")
NAMES = ("name", "age", "tags", "id", "first name", "größe", "a", "b", "c", "value", "next", "$ref")
PATTERNS = (
    r"^[a-z]{1,6}$",
    r"^[A-Z]{2}-\d{2}$",
    r"^(yes|no|maybe)$",
    r"^\d{1,3}%?$",
    r"^[ab]*c$",
    r"^.{2,4}$",
)
# Without time and date-time: whether second 60 is valid depends on the day.
FORMATS = ("date", "ipv4", "ipv6", "uuid")


@dataclass(frozen=True)
class Case:
    """One constraint, in the fields of a request."""

    fields: dict[str, Any]
    accepts: Callable[[str], bool]


def schema_case(seed: int) -> Case:
    """Return a random JSON schema in one of the fields that clients send it in."""
    draw = random.Random(f"schema/{seed}")
    schema = Schemas(draw).root()
    # The tiny models write as much whitespace as they may.
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}} if draw.random() < 0.8 else schema
    options = draw.choice(({"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}))
    fields: dict[str, Any] = draw.choice(
        (
            {"structured_outputs": {"json": schema, **options}},
            {"structured_outputs": {"json": schema, **options}},
            {"structured_outputs": {"json": json.dumps(schema), **options}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": compact}}},
            {"guided_json": schema, "guided_whitespace_pattern": ""},
            {"json_schema": json.dumps(compact)},
        )
    )
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)

    def accepts(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    return Case(fields, accepts)


def text_case(seed: int) -> Case:
    """Return a random regular expression, choice, or grammar in Lark or EBNF."""
    draw = random.Random(f"text/{seed}")
    shape = Texts(draw).text(3)
    options = sorted({draw.choice(WORDS[:-1]) for _ in range(3)})
    fields, pattern = draw.choice(
        (
            ({"regex": shape.regex}, shape.regex),
            ({"structured_outputs": {"regex": shape.regex}}, shape.regex),
            ({"structured_outputs": {"grammar": shape.lark}}, shape.regex),
            ({"guided_grammar": shape.lark}, shape.regex),
            ({"ebnf": shape.ebnf}, shape.regex),
            ({"structured_outputs": {"choice": options}}, "|".join(map(re.escape, options))),
        )
    )
    compiled = re.compile(pattern, re.DOTALL)
    return Case(fields, lambda text: compiled.fullmatch(text) is not None)


class Schemas:
    """Draws JSON schemas: every keyword that is supported, with bounds that keep answers short."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._left = draw.randint(3, 9)  # values that may still be added
        self._defs: dict[str, Schema] = {}

    def root(self) -> Schema:
        for name in self._draw.sample(("item", "pair", "node"), self._draw.randint(0, 2)):
            self._defs[name] = self._list_node(name) if name == "node" else self._value(1)
        made = self._draw.choice((self._object, self._object, self._object, self._array, self._value))(2)
        return {**made, "$defs": self._defs} if self._defs else made

    def _list_node(self, name: str) -> Schema:
        """Return a recursive schema: a linked list."""
        following = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        properties = {"v": {"type": "boolean"}, "next": following}
        return {
            "type": "object",
            "properties": properties,
            "required": ["v", "next"],
            "additionalProperties": False,
        }

    def _value(self, depth: int) -> Schema:
        self._left -= 1
        flat = (self._string, self._string, self._integer, self._number, self._plain, self._fixed)
        deep = (self._object, self._array, self._any_of, self._all_of, self._reference)
        if depth == 0 or self._left <= 0:
            return self._draw.choice(flat)(0)
        return self._draw.choice((*flat, *deep))(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._draw.sample(NAMES, self._draw.randint(1, 4))
        made: Schema = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        required = [name for name in names if self._draw.random() < 0.7]
        if required or self._draw.random() < 0.5:
            made["required"] = required
        if self._draw.random() < 0.03:
            return {"type": "object", "additionalProperties": self._value(0), "maxProperties": 2}
        if self._draw.random() < 0.1:
            return {**made, "patternProperties": {"^x_[a-z]$": self._value(0)}, "additionalProperties": False}
        if self._draw.random() < 0.03:
            return {**made, "additionalProperties": {"type": "boolean"}}
        return {**made, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._draw.randint(0, 2)
        made: Schema = {"type": "array", "minItems": least, "maxItems": least + self._draw.randint(0, 2)}
        if self._draw.random() < 0.3:
            first = [self._value(depth) for _ in range(self._draw.randint(1, 2))]
            made["prefixItems"] = first
            if self._draw.random() < 0.5:
                return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        return {**made, "items": self._value(depth)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth) for _ in range(self._draw.randint(2, 3))]}

    def _all_of(self, depth: int) -> Schema:
        low = self._draw.randint(-50, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + self._draw.randint(0, 200)}]}

    def _reference(self, depth: int) -> Schema:
        if not self._defs:
            return self._value(depth)
        return {"$ref": f"#/$defs/{self._draw.choice(sorted(self._defs))}"}

    def _string(self, _: int) -> Schema:
        kind = self._draw.random()
        if kind < 0.3:
            return {"type": "string", "pattern": self._draw.choice(PATTERNS)}
        if kind < 0.4:
            return {"type": "string", "format": self._draw.choice(FORMATS)}
        least = self._draw.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._draw.randint(0, 8)}

    def _integer(self, _: int) -> Schema:
        low = self._draw.randint(-200, 200)
        made: Schema = {"type": "integer", "minimum": low, "maximum": low + self._draw.randint(0, 500)}
        if self._draw.random() < 0.2:
            return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10}
        if self._draw.random() < 0.2:
            return {**made, "maximum": low + 20, "multipleOf": self._draw.choice((2, 5, 7))}
        return made

    def _number(self, _: int) -> Schema:
        low = round(self._draw.uniform(-20, 20), 1)
        if self._draw.random() < 0.3:
            return {"type": "number", "minimum": 0, "maximum": 4, "multipleOf": 0.25}
        return {"type": "number", "minimum": low, "maximum": low + 10}

    def _plain(self, _: int) -> Schema:
        return self._draw.choice(({"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}))

    def _fixed(self, _: int) -> Schema:
        values: list[Any] = [*self._draw.sample(WORDS, 3), 17, -0.5, None, True, {"k": [1, "v"]}, []]
        if self._draw.random() < 0.3:
            return {"const": self._draw.choice(values)}
        return {"enum": self._draw.sample(values, self._draw.randint(1, 5))}


@dataclass(frozen=True)
class Text:
    """The same set of texts in three notations."""

    regex: str
    rules: str  # an expression over `names`, in both notations of grammars
    names: dict[str, str]  # further rules: name -> expression

    @property
    def lark(self) -> str:
        return "\n".join((f"start: {self.rules}", *(f"{name}: {rule}" for name, rule in self.names.items())))

    @property
    def ebnf(self) -> str:
        named = (f"{name} ::= {rule}" for name, rule in self.names.items())
        return "\n".join((f"root ::= {self.rules}", *named))


class Texts:
    """Draws sets of texts: literals, sequences, alternatives, options and bounded repetitions."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._names: dict[str, str] = {}

    def text(self, depth: int) -> Text:
        regex, rules = self._expression(depth)
        return Text(regex, rules, self._names)

    def _expression(self, depth: int) -> tuple[str, str]:
        if depth == 0:
            return self._leaf(0)
        kinds = (self._leaf, self._sequence, self._sequence, self._either, self._repeated, self._named)
        return self._draw.choice(kinds)(depth - 1)

    def _leaf(self, _: int) -> tuple[str, str]:
        literal = self._draw.choice(WORDS[:-1])
        return re.escape(literal), json.dumps(literal, ensure_ascii=False)

    def _sequence(self, depth: int) -> tuple[str, str]:
        parts = [self._expression(depth) for _ in range(self._draw.randint(2, 3))]
        return "".join(f"(?:{regex})" for regex, _ in parts), " ".join(f"({rule})" for _, rule in parts)

    def _either(self, depth: int) -> tuple[str, str]:
        parts = [self._expression(depth) for _ in range(self._draw.randint(2, 3))]
        return "|".join(f"(?:{regex})" for regex, _ in parts), " | ".join(f"({rule})" for _, rule in parts)

    def _repeated(self, depth: int) -> tuple[str, str]:
        # A name, because the converter of EBNF writes repetitions of repetitions without parentheses.
        regex, rule = self._named(depth)
        least = self._draw.randint(0, 2)
        count = "?" if least == 0 else f"{{{least},{least + self._draw.randint(0, 2)}}}"
        return f"(?:{regex}){count}", f"{rule}{count}"

    def _named(self, depth: int) -> tuple[str, str]:
        regex, rule = self._expression(depth)
        name = f"part{'abcdefghijklmnop'[len(self._names)]}"
        self._names[name] = rule
        return f"(?:{regex})", name
