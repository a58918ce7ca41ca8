"""Reads the constraint of an answer from the fields of a request."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from common.errors import InvalidGrammar, InvalidRequest
from common.messages.generation import MAX_GRAMMAR
from router.grammar.constraint import Constraint, Ebnf, JsonSchema, OneOf, Regex
from router.grammar.lark import Lark
from router.grammar.structural_tags import read_tags
from router.requests.constraint_fields import ConstraintFields, ResponseFormat, StructuredOutputs
from router.requests.field_rules import RareFields

MAX_CHOICES = 4096
MAX_PATTERN = 256  # characters of a whitespace pattern
FieldsT = TypeVar("FieldsT", bound=ConstraintFields)
ANY_OBJECT = '{"type":"object"}'
_CONSTRAINTS = RareFields(*ConstraintFields.__annotations__)


def read_constraint(fields: ConstraintFields) -> Constraint | None:
    """Return the constraint of a request; None if its answer is free.

    Raises InvalidRequest or InvalidGrammar with the field: for two constraints, for unknown types, and for what is too
    large to be compiled. Whether the rest can be compiled shows in `grammar_text`.
    """
    if not _CONSTRAINTS.given(fields):
        return None
    found = [
        *_response_format(fields.response_format),
        *_structured_outputs(fields.structured_outputs),
        *_older_fields(fields),
        *_sglang_fields(fields),
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].field} and {found[1].field} both constrain the answer; send only one",
            param=found[1].field,
        )
    return found[0] if found else None


def with_schema_texts(fields: FieldsT) -> FieldsT:
    """Return the same fields with schemas as texts, since msgpack has no integers over 64 bits."""
    form, structured = fields.response_format, fields.structured_outputs
    if form is not None:
        inner = form.json_schema
        if inner is not None:
            inner = replace(inner, schema=_schema_text(inner.schema))
        form = replace(
            form,
            json_schema=inner,
            schema=_schema_text(form.schema),
            structures=_schema_text(form.structures),
        )
    if structured is not None:
        structured = replace(
            structured,
            json=_schema_text(structured.json),
            structural_tag=_schema_text(structured.structural_tag),
        )
    return replace(
        fields,
        response_format=form,
        structured_outputs=structured,
        guided_json=_schema_text(fields.guided_json),
        json_schema=_schema_text(fields.json_schema),
    )


def _schema_text(schema: Any) -> str | None:
    return schema if schema is None or isinstance(schema, str) else msgspec.json.encode(schema).decode()


def _response_format(given: ResponseFormat | None) -> list[Constraint]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        if given.schema is None:
            return [Constraint("response_format", JsonSchema(ANY_OBJECT))]
        return [_json("response_format.schema", given.schema)]
    if given.type == "structural_tag":
        return [_structural_tag(given)]
    if given.type != "json_schema":
        raise InvalidRequest(
            "response_format.type must be text, json_object, json_schema or structural_tag, not "
            f"{given.type[:40]!r}",
            param="response_format.type",
        )
    if given.json_schema is None or given.json_schema.schema is None:
        raise InvalidRequest(
            "response_format of type json_schema needs json_schema.schema",
            param="response_format.json_schema",
        )
    return [_json("response_format.json_schema", given.json_schema.schema)]


def _structural_tag(given: ResponseFormat) -> Constraint:
    field = "response_format"
    if given.format is not None:
        raise InvalidRequest(
            "response_format.format is not supported; send structures and triggers",
            param="response_format.format",
        )
    structures = _schema_text(given.structures) or "null"
    triggers = msgspec.json.encode(given.triggers).decode()
    text = _bounded(f'{{"structures":{structures},"triggers":{triggers}}}', field)
    return Constraint(field, read_tags(text, field))


def _structured_outputs(given: StructuredOutputs | None) -> list[Constraint]:
    if given is None:
        return []
    name = "structured_outputs"
    options = JsonSchema(
        ANY_OBJECT,
        any_whitespace=not given.disable_any_whitespace,
        whitespace_pattern=_pattern(given.whitespace_pattern, f"{name}.whitespace_pattern"),
        closed=bool(given.disable_additional_properties),
    )
    found = []
    if given.json is not None:
        found.append(_json(f"{name}.json", given.json, options))
    if given.json_object:
        found.append(Constraint(f"{name}.json_object", options))
    found += _texts(name, ".", given.regex, given.choice, given.grammar)
    if given.structural_tag is not None:
        field = f"{name}.structural_tag"
        text = _bounded(_schema_text(given.structural_tag) or "", field)
        found.append(Constraint(field, read_tags(text, field)))
    if not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag",
            param="structured_outputs",
        )
    return found


def _older_fields(fields: ConstraintFields) -> list[Constraint]:
    found = _texts("guided", "_", fields.guided_regex, fields.guided_choice, fields.guided_grammar)
    if fields.guided_json is not None:
        pattern = _pattern(fields.guided_whitespace_pattern, "guided_whitespace_pattern")
        options = JsonSchema(ANY_OBJECT, whitespace_pattern=pattern)
        found.append(_json("guided_json", fields.guided_json, options))
    return found


def _sglang_fields(fields: ConstraintFields) -> list[Constraint]:
    found = []
    if fields.json_schema is not None:
        found.append(_json("json_schema", fields.json_schema))
    if fields.regex is not None:
        found.append(Constraint("regex", Regex(_bounded(fields.regex, "regex"))))
    if fields.ebnf is not None:
        found.append(Constraint("ebnf", Ebnf(_bounded(fields.ebnf, "ebnf"))))
    return found


def _texts(
    name: str, joint: str, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[Constraint]:
    found: list[Constraint] = []
    if regex is not None:
        field = f"{name}{joint}regex"
        found.append(Constraint(field, Regex(_bounded(regex, field))))
    if choice is not None:
        field = f"{name}{joint}choice"
        if not 1 <= len(choice) <= MAX_CHOICES:
            raise InvalidRequest(f"{field} must have 1 to {MAX_CHOICES} texts", param=field)
        if sum(map(len, choice)) > MAX_GRAMMAR // 2:
            raise InvalidGrammar(f"{field} is too long", param=field)
        found.append(Constraint(field, OneOf(choice)))
    if grammar is not None:
        field = f"{name}{joint}grammar"
        text = _bounded(grammar, field)
        found.append(Constraint(field, Ebnf(text) if "::=" in text else Lark(text)))
    return found


def _json(field: str, schema: Any, options: JsonSchema | None = None) -> Constraint:
    """`schema`: a JSON value, or a text of one."""
    text = _bounded(_schema_text(schema) or "", field)
    return Constraint(field, replace(JsonSchema("") if options is None else options, schema=text))


def _pattern(given: str | None, field: str) -> str | None:
    if given is not None and len(given) > MAX_PATTERN:
        raise InvalidRequest(f"{field} may have at most {MAX_PATTERN} characters", param=field)
    return given


def _bounded(text: str, field: str) -> str:
    if len(text) > MAX_GRAMMAR:
        raise InvalidGrammar(f"{field} has {len(text)} characters; the limit is {MAX_GRAMMAR}", param=field)
    return text
