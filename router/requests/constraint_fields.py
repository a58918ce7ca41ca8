"""Fields of requests for structured output, as clients of OpenAI, vLLM and SGLang send them."""

from __future__ import annotations

from typing import Any

import msgspec

from router.requests.sampling_fields import SamplingFields


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """`response_format.json_schema`. `name`, `description` and `strict` have no effect: every schema is enforced."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`: text, json_object or json_schema; vLLM's and SGLang's structural_tag."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None  # for json_object, as in llama.cpp
    # for structural_tag: begin, schema and end of each tag; a trigger begins one of them
    structures: Any = None
    triggers: list[str] | None = None
    format: Any = None  # xgrammar's other form of structural tags: refused


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's `structured_outputs`: one of the constraints, and options for `json` and `json_object`."""

    json: Any = None  # a schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF or Lark
    json_object: bool | None = None
    structural_tag: Any = None  # structures and triggers, or the text of that
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class ConstraintFields(SamplingFields, frozen=True, kw_only=True):
    """All fields of a request that constrain its answer; at most one may be given. See `read_constraint`.

    It extends the sampling fields because a struct cannot have two bases.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # there is one backend: no effect
    # SGLang's names
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
