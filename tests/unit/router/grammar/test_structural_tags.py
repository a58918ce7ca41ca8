"""Structural tags: which answers they allow, in every form that clients send, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidGrammar, InvalidRequest
from common.grammar import GrammarCompiler
from router.grammar.constraint import Constraint
from router.grammar.grammar_text import grammar_text
from router.grammar.grammar_work import GrammarWork
from router.grammar.structural_tags import Tag, Tags
from router.requests.constraint_fields import ConstraintFields
from router.requests.read_constraint import read_constraint, with_schema_texts
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import one_by_one

TOKENIZER = Tokenizer(Path("deploy/tiny_models/tiny-target"))
VOCAB, EOS, SPECIAL = 704, (2,), 1
WORK = GrammarWork(TOKENIZER)
COMPILER = GrammarCompiler(TOKENIZER.json(), VOCAB, EOS)
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=age>", "schema": AGE, "end": "</f>"},
        {"begin": "<f=list>", "schema": {"type": "array", "items": {"type": "boolean"}}, "end": "</f>"},
        {"begin": "[[", "schema": {"enum": [7, 2**70]}, "end": "]]"},
    ],
    "triggers": ["<f=", "[["],
}
FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "structural_tag", **TAGS}},
    {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAGS})}},
    {"structured_outputs": {"structural_tag": TAGS}},
]


def _compiled(body: dict[str, Any]) -> str:
    fields = with_schema_texts(msgspec.json.decode(json.dumps(body), type=ConstraintFields))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ConstraintFields)
    constraint = read_constraint(fields)
    assert constraint is not None
    WORK.prepare(VOCAB, EOS)
    return WORK.compile(constraint, VOCAB, EOS)


def _accepts(grammar: str, *parts: str | int) -> bool:
    tokens = [
        token for part in parts for token in ([part] if isinstance(part, int) else COMPILER.tokenize(part))
    ]
    return COMPILER.matcher(grammar).accept([*tokens, EOS[0]])


@pytest.mark.parametrize("body", FORMS)
def test_text_is_free_but_in_tags(body: dict[str, Any]) -> None:
    grammar = _compiled(body)
    assert str(2**70) in grammar, "integers of any size reach the nodes"
    good = (
        "",
        "any text, also { and <f and f=",
        'first <f=age>{"age": 5}</f> then <f=list>[true,false]</f>',
        '<f=age>{"age": 1}</f>[[7]] and more',
    )
    bad = (
        "<f=",
        "a <f=name>{}</f>",
        '<f=age>{"age": "5"}</f>',
        '<f=age>{"age": 5}',
        '<f=age>{"age": 5}</f> <f=list>[1]</f>',
        "[[5]]",
        '<f=list>{"age": 5}</f>',
    )
    assert [text for text in good if not _accepts(grammar, text)] == []
    assert [text for text in bad if _accepts(grammar, text)] == []


def test_special_tokens_in_tags_are_tokens() -> None:
    """The text of a special token is never drawn as ordinary text."""
    name = TOKENIZER.token_text(SPECIAL)
    assert TOKENIZER.markers_in(name) == {name: SPECIAL}
    tags = Tags([Tag(f"{name}a", '{"type":"integer"}', name)], [name])
    WORK.prepare(VOCAB, EOS)
    grammar = WORK.compile(Constraint("f", tags), VOCAB, EOS)
    assert _accepts(grammar, "free", SPECIAL, "a5", SPECIAL, "free")
    assert not _accepts(grammar, "free", SPECIAL, "b5", SPECIAL)
    mixed = Constraint("f", Tags([Tag(f"x{name}a", "{}", "")], [f"x{name}"]))
    with pytest.raises(InvalidGrammar, match="this token and nothing else"):
        grammar_text(mixed, {name: SPECIAL})
    within = Constraint("f", Tags([Tag(f"{name}a", "{}", "")], [name[:-1]]))
    with pytest.raises(InvalidGrammar, match="ends inside the special token"):
        grammar_text(within, {name: SPECIAL})


STRUCTURE = {"begin": "<a>", "schema": {}, "end": "</a>"}
TOO_MANY = [{**STRUCTURE, "begin": f"<a>{index}"} for index in range(129)]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"structures": [STRUCTURE]},
        {"structures": [], "triggers": ["<a>"]},
        {"structures": TOO_MANY, "triggers": ["<a>"]},
        {"structures": [STRUCTURE], "triggers": ["<b>"]},
        {"structures": [STRUCTURE], "triggers": ["<a", "<a>"]},
        {"structures": [STRUCTURE], "triggers": ["<a>", "<b>"]},
        {"structures": [STRUCTURE], "triggers": [""]},
        {"structures": [{"schema": {}}], "triggers": ["<a>"]},
        {"structures": "[", "triggers": ["<a>"]},
    ],
)
def test_wrong_tags_are_refused_by_name(wrong: dict[str, Any]) -> None:
    for field, body in (
        ("response_format", {"response_format": {"type": "structural_tag", **wrong}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": wrong}}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            read_constraint(msgspec.json.decode(json.dumps(body), type=ConstraintFields))
        assert caught.value.param == field


def test_the_other_form_is_refused() -> None:
    body = {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}
    with pytest.raises(InvalidRequest, match="structures and triggers"):
        read_constraint(msgspec.json.decode(json.dumps(body), type=ConstraintFields))


async def test_every_route_takes_them(rig: Rig) -> None:
    rig.generator.will(*one_by_one([331]))
    text = json.dumps({"type": "structural_tag", **TAGS})
    asked = [
        ("/v1/completions", {"prompt": "x", **FORMS[0]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **FORMS[1]}),
        ("/generate", {"text": "x", "sampling_params": {"structural_tag": text}}),
    ]
    for path, body in asked:
        status, answer, _ = await rig.post(path, body)
        assert status == 200, answer
    grammars = {request.sampling.grammar for request in rig.generator.requests}
    assert len(grammars) == 1
    assert "content_0" in grammars.pop()
    wrong = {"text": "x", "sampling_params": {"structural_tag": "{}"}}
    status, answer, _ = await rig.post("/generate", wrong)
    assert (status, answer["error"]["param"]) == (400, "sampling_params.structural_tag")
