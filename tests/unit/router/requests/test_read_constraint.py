"""Fields for structured output become one constraint and one grammar that compiles; errors name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidGrammar, InvalidRequest
from common.grammar import GrammarCompiler
from common.messages.generation import MAX_GRAMMAR
from router.grammar.constraint import Constraint, End, Form, JsonSchema, Regex
from router.grammar.grammar_text import grammar_text
from router.grammar.grammar_work import GrammarWork
from router.grammar.known_grammars import KnownGrammars
from router.grammar.lark import Lark
from router.requests.constraint_fields import ConstraintFields
from router.requests.read_constraint import read_constraint, with_schema_texts
from router.tokens.tokenizer import Tokenizer

TOKENIZER = Tokenizer(Path("deploy/tiny_models/tiny-target"))
VOCAB, EOS = 704, (2,)
WORK = GrammarWork(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER.json(), VOCAB, EOS)
AGE: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
EBNF = 'root ::= "a" | "b" [0-9]+'
LARK = 'start: "a" | "b" /[0-9]+/'


def _fields(body: dict[str, Any]) -> ConstraintFields:
    return msgspec.json.decode(json.dumps(body), type=ConstraintFields)


def _accepts(grammar: str, text: str, token: int | None = None, rest: str = "") -> bool:
    """Whether a grammar accepts a text as a whole, or a text, a special token and another text."""
    tokens = COMPILER.tokenize(text) + ([] if token is None else [token]) + COMPILER.tokenize(rest)
    return COMPILER.matcher(grammar).accept([*tokens, EOS[0]])


def _compiled(body: dict[str, Any]) -> str:
    constraint = read_constraint(_fields(body))
    assert constraint is not None
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=Constraint)
    WORK.prepare(VOCAB, EOS)
    return WORK.compile(sent, VOCAB, EOS)


@pytest.mark.parametrize(
    ("body", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1, null]}', "[1]"),
        ({"response_format": {"type": "json_object", "schema": AGE}}, '{"age":1}', "{}"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": AGE}}},
            '{"age": 1, "x": 2}',
            '{"age":"1"}',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": AGE, "strict": True}}},
            '{ "age" : 1 }',
            '{"ages":1}',
        ),
        ({"structured_outputs": {"json": AGE}}, '{"age": 1}', "{}"),
        ({"structured_outputs": {"json": json.dumps(AGE)}}, '{"age": 1}', "{}"),
        ({"structured_outputs": {"json": AGE, "disable_any_whitespace": True}}, '{"age":1}', '{"age": 1}'),
        ({"structured_outputs": {"json": AGE, "whitespace_pattern": " "}}, '{"age": 1}', '{"age":  1}'),
        (
            {"structured_outputs": {"json": AGE, "disable_additional_properties": True}},
            '{"age":1}',
            '{"age":1,"x":2}',
        ),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "a+b"}}, "aab", "aabb"),
        ({"structured_outputs": {"choice": ["yes", 'n"o\n']}}, 'n"o\n', "no"),
        ({"structured_outputs": {"grammar": EBNF}}, "b12", "b"),
        ({"structured_outputs": {"grammar": LARK}}, "b12", "b"),
        ({"guided_json": AGE, "guided_decoding_backend": "outlines"}, '{"age":1}', "{}"),
        ({"guided_json": AGE, "guided_whitespace_pattern": ""}, '{"age":1}', '{"age": 1}'),
        ({"guided_regex": "a|b"}, "b", "ab"),
        ({"guided_choice": ["a", "b"]}, "b", "ab"),
        ({"guided_grammar": EBNF}, "a", "b"),
        ({"json_schema": json.dumps(AGE)}, '{"age":1}', "{}"),
        ({"json_schema": AGE, "response_format": {"type": "text"}}, '{"age":1}', "{}"),
        ({"regex": "ä+"}, "ää", "a"),
        ({"ebnf": EBNF}, "b1", "c"),
    ],
)
def test_each_field_constrains(body: dict[str, Any], good: str, bad: str) -> None:
    grammar = _compiled(body)
    assert _accepts(grammar, good)
    assert not _accepts(grammar, bad)
    assert not _accepts(grammar, "")


ANY_JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_printed_json_is_accepted(indent: int | str | None) -> None:
    value = {"a": [{"b": [1, {"c": {}}]}], "d": [], "e": " \n\n "}
    for separators in (None, (",", ":"), (" , ", " : ")):
        text = json.dumps(value, indent=indent, separators=separators)
        assert _accepts(_compiled(ANY_JSON), text)
        assert _accepts(_compiled(ANY_JSON), text.replace("\n", "\r\n"))


LONG_RUNS = ('{\n\n"age":1}', '{"age":  1}', '{"age":1' + "\n" + 25 * " " + "}", '{"age":\t\t1}')


@pytest.mark.parametrize("text", LONG_RUNS)
def test_runs_of_whitespace_are_bounded(text: str) -> None:
    bounded = {"json": AGE}, {"json_object": True}
    for form in bounded:
        assert not _accepts(_compiled({"structured_outputs": form}), text)
    own = {**AGE, "x-guidance": {"coerce_one_of": True}}
    assert not _accepts(_compiled({"json_schema": own}), text)
    tag = {"begin": "<a>", "schema": AGE, "end": "</a>"}
    tags = {"response_format": {"type": "structural_tag", "structures": [tag], "triggers": ["<a"]}}
    assert not _accepts(_compiled(tags), f"<a>{text}</a>")
    assert _accepts(_compiled(tags), '<a>{"age": 1}</a>')


@pytest.mark.parametrize("text", LONG_RUNS)
def test_a_request_lifts_the_bound(text: str) -> None:
    free = {**AGE, "x-guidance": {"whitespace_flexible": True}}
    assert _accepts(_compiled({"json_schema": free}), text)
    own = {"json": AGE, "whitespace_pattern": r"[ \n\t]*"}
    assert _accepts(_compiled({"structured_outputs": own}), text)


def test_a_schema_of_one_layout_keeps_it() -> None:
    compact = {**AGE, "x-guidance": {"whitespace_flexible": False}}
    assert _accepts(_compiled({"json_schema": compact}), '{"age":1}')
    assert not _accepts(_compiled({"json_schema": compact}), '{"age": 1}')


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"guided_decoding_backend": "x"}]
)
def test_free_answers(body: dict[str, Any]) -> None:
    assert read_constraint(_fields(body)) is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"regex": "a", "guided_regex": "a"}, "regex", "guided_regex and regex both constrain"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag",
            "needs structures",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
        ({"guided_choice": ["a" * MAX_GRAMMAR]}, "guided_choice", "too long"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
        ({"json_schema": "x" * (MAX_GRAMMAR + 1)}, "json_schema", "limit"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 257}},
            "structured_outputs.whitespace_pattern",
            "256",
        ),
    ],
)
def test_fields_are_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_constraint(_fields(body))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"json_schema": "{"}, "cannot be read"),
        ({"json_schema": "[]"}, "must be a JSON object"),
        ({"json_schema": {"type": "strin"}}, "Invalid type"),
        ({"json_schema": False}, "Unsatisfiable|cannot be compiled"),
        ({"json_schema": "[" * 60_000}, "cannot be read"),
        ({"json_schema": '{"const":"\\ud800"}'}, "cannot be read"),
        ({"json_schema": {"properties": {f"p{i}": {} for i in range(600)}}}, "over 512 properties"),
        ({"json_schema": {"multipleOf": 999_983}}, "least common multiple"),
        ({"regex": "a("}, "unclosed group"),
        ({"ebnf": "root = 1"}, "cannot be read"),
        ({"ebnf": "x ::= y"}, "unknown name|cannot be"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "unknown name"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "cannot be compiled"),
    ],
)
def test_grammars_that_do_not_compile_name_the_field(body: dict[str, Any], words: str) -> None:
    [field] = body
    with pytest.raises(InvalidGrammar, match=words) as caught:
        _compiled(body)
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)


def test_integers_of_any_size_survive() -> None:
    fields = _fields({"guided_json": {"const": 2**70}})
    with_texts = with_schema_texts(fields)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(with_texts), type=ConstraintFields)
    assert read_constraint(sent) == read_constraint(fields)
    constraint = read_constraint(sent)
    assert constraint is not None
    assert str(2**70) in grammar_text(constraint)


@pytest.mark.parametrize("form", [Regex("a+"), JsonSchema(json.dumps(AGE)), Lark('start: "x"')])
def test_free_text_may_come_first(form: Form) -> None:
    """Reasoning ends with a text or with a special token; only what follows is constrained."""
    answer = {"Regex": "aa", "JsonSchema": '{"age": 7}', "Lark": "x"}[type(form).__name__]
    text = grammar_text(Constraint("f", form, after=End("</think>")))
    assert _accepts(text, "I th<ink{ </thin </think>" + answer)
    assert _accepts(text, "</think>" + answer)
    assert not _accepts(text, answer)
    assert not _accepts(text, "</think>?" + answer)
    special = grammar_text(Constraint("f", form, after=End("<pad>", special={"<pad>": 1})))
    assert _accepts(special, "I think </think>", 1, answer)
    assert not _accepts(special, "I think </think>" + answer)


@pytest.mark.parametrize("begun", [True, False])
def test_markers_may_be_text_and_special_tokens(begun: bool) -> None:
    after = End("so<pad>end", None if begun else "<pad>think", {"<pad>": 1})
    text = grammar_text(Constraint("f", Regex("a+"), after=after))
    before = [] if begun else [1, *COMPILER.tokenize("think")]

    def accepted(thought: str, rest: str) -> bool:
        tokens = [*before, *COMPILER.tokenize(thought), 1, *COMPILER.tokenize(rest), *EOS]
        return COMPILER.matcher(text).accept(tokens)

    assert accepted("and so", "end aa")
    assert accepted("so", "endaa")
    assert accepted("so it is and so", "end aa")
    assert not accepted("and so", "aa")
    assert not accepted("and", "end aa")
    assert _accepts(text, "aa") is not begun


def test_lark_may_refer_to_schemas() -> None:
    lark = 'start: call ("\\n" call)*\ncall: "<call>" @first "</call>" | "<call>" @second "</call>"'
    schemas = {"first": json.dumps(AGE), "second": json.dumps({"const": "b"})}
    text = grammar_text(Constraint("tools", Lark(lark, schemas, compact=True)))
    assert _accepts(text, '<call>{"age":1}</call>\n<call>"b"</call>')
    assert not _accepts(text, '<call>{"age": 1}</call>')
    after = grammar_text(Constraint("tools", Lark(lark, schemas), after=End("</think>")))
    assert _accepts(after, 'x</think><call>{"age": 1}</call>')


def test_known_grammars_are_bounded() -> None:
    known = KnownGrammars()
    for number in range(300):
        known.add(b"%d" % number, "g")
        assert known.get(b"0") == "g", "what is used stays"
    assert known.get(b"299") == "g"
    assert known.get(b"1") is None
    known.add(b"large", "x" * (8 << 20))
    assert known.get(b"large") is None


def test_a_grammar_in_lark_names_special_tokens() -> None:
    """The names in strings, comments and regular expressions are text."""
    lark = 'start: <|user|> "<|user|>" // <|user|>\n | /<\\|user\\|>/ <|assistant|>'
    grammar = _compiled({"structured_outputs": {"grammar": lark}})
    user, other = (TOKENIZER.markers_in(name)[name] for name in ("<|user|>", "<|assistant|>"))
    matcher = COMPILER.matcher(grammar)
    assert matcher.fork().accept([user, *COMPILER.tokenize("<|user|>"), EOS[0]])
    assert not matcher.fork().accept([user, user])
    assert matcher.fork().accept([*COMPILER.tokenize("<|user|>"), other, EOS[0]])
    assert user not in COMPILER.tokenize("<|user|>")
