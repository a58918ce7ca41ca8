"""Hostile constraints in a text worker: refused with the field and the reason, or compiled; nothing else happens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common.errors import InvalidGrammar, InvalidRequest, RequestError
from common.grammar import GrammarCompiler, mask_width
from router.grammar.constraint import End
from router.grammar.grammar_work import GrammarWork
from router.requests.constraint_fields import ConstraintFields
from router.requests.read_constraint import read_constraint, with_schema_texts
from router.tokens.tokenizer import Tokenizer
from tests.fakes.hostile_grammars import HOSTILE
from tests.unit.router.conftest import SERVED, TINY

VOCAB, EOS = SERVED.vocab_size, SERVED.eos_token_ids
# Most of them cost llguidance or its limits more than anything else that the same number of bytes can say.
REFUSED = {
    "4,000 properties",
    "513 optional properties",
    "nested 100 deep",
    "nested 20,000 deep",
    "enum of 100,000",
    "enum of 19,000",
    "allOf of 40 patterns",
    "allOf of patterns of a property",
    "a chain of references with patterns",
    "anchors with patterns",
    "a long enum with a pattern",
    "400 patternProperties",
    "a remote reference",
    "multipleOf a large prime",
    "an intersection of 24 patterns",
    "deep groups",
    "deep parentheses of Lark",
    "deep parentheses of EBNF",
}


@pytest.fixture(scope="module")
def work() -> GrammarWork:
    made = GrammarWork(Tokenizer(TINY))
    made.prepare(VOCAB, EOS)
    return made


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((TINY / "tokenizer.json").read_text(), VOCAB, EOS)


def named(error: RequestError, field: str) -> str:
    """Return the field that an error names, which has to be the given one or a part of it."""
    assert error.param is not None
    assert error.param.split(".")[0] == field
    assert error.param in str(error)
    assert len(str(error)) < 1000
    return error.param


def refusal(work: GrammarWork, compiler: GrammarCompiler, fields: dict[str, Any]) -> str | None:
    """Return the field that is refused. A grammar that compiles is followed for some tokens."""
    try:
        constraint = read_constraint(with_schema_texts(msgspec.convert(fields, ConstraintFields)))
        assert constraint is not None
        matcher = compiler.matcher(work.compile(constraint, VOCAB, EOS))
    except (InvalidGrammar, InvalidRequest) as error:
        return named(error, *fields)
    mask = np.zeros((1, mask_width(VOCAB)), dtype=np.int32)
    for turn in range(12):
        matcher.fill(mask, 0)
        if matcher.failure is not None or matcher.stopped:
            break
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
        matcher.accept([int(allowed[turn % len(allowed)])])
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints(name: str, work: GrammarWork, compiler: GrammarCompiler) -> None:
    refused = refusal(work, compiler, HOSTILE[name])
    assert refused is not None or name not in REFUSED


def test_all_names_exist() -> None:
    assert set(HOSTILE) >= REFUSED


numbers = st.sampled_from((-1, 0, 1, 3, 2.5, 1e300, 10**9, 10**30, -(2**63)))
texts = st.sampled_from(
    ("", "a", "^a+$", "(a|b){1,9}", "[", "\\", "(?=a)", "date", "uuid", "é\0", "#", "#/$defs/a")
)
types = st.sampled_from(("object", "array", "string", "integer", "number", "boolean", "null", "strin", 5))
NUMERIC = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
)
TEXTUAL = ("pattern", "format", "$ref", "const")
NESTED = ("items", "additionalProperties", "not")
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems", "enum")
NAMED = ("properties", "$defs", "patternProperties")


def _schema(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords = {
        **dict.fromkeys(NUMERIC, numbers | texts),
        **dict.fromkeys(TEXTUAL, texts | numbers),
        **dict.fromkeys(NESTED, inner),
        **dict.fromkeys(LISTED, st.lists(inner, max_size=3) | inner),
        **dict.fromkeys(NAMED, st.dictionaries(texts, inner, max_size=3) | inner),
        "required": st.lists(texts, max_size=2),
        "type": types | st.lists(types, max_size=2),
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: keywords[name] for name in names}))


schemas = st.recursive(st.booleans() | numbers | texts | st.none(), _schema, max_leaves=12)
marks = st.sampled_from([*'ab"/()[]{}|*+?~&@:<>=%\\\n ,1,9', "start: ", "root ::= ", "T: ", "{1,9}", "%json"])
notes = st.lists(marks, max_size=24).map("".join)


@settings(max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        schemas.map(lambda schema: {"json_schema": json.dumps(schema)}),
        notes.map(lambda text: {"regex": text}),
        notes.map(lambda text: {"ebnf": f"root ::= {text}"}),
        notes.map(lambda text: {"structured_outputs": {"grammar": f"start: {text}"}}),
        st.lists(notes, max_size=3).map(lambda options: {"structured_outputs": {"choice": options}}),
    )
)
def test_random_constraints(work: GrammarWork, compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    refusal(work, compiler, fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json_schema": {"$ref": "#"}}, "refers to itself"),
        ({"ebnf": 'root ::= root "a"'}, "cannot be compiled"),
        ({"regex": r"[^\s\S]"}, "cannot be compiled"),
    ],
)
def test_reasoning_before_it_hides_no_failure(work: GrammarWork, fields: dict[str, Any], reason: str) -> None:
    asked = read_constraint(with_schema_texts(msgspec.convert(fields, ConstraintFields)))
    assert asked is not None
    for after in (None, End("</think>"), End("</think>", begin="<think>")):
        with pytest.raises(InvalidGrammar, match=reason) as refused:
            work.compile(replace(asked, after=after), VOCAB, EOS)
        assert refused.value.param == next(iter(fields))
