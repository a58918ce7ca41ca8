"""Requests for structured output over HTTP: the grammar that reaches the nodes, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.templates.chat_template import ChatTemplate
from router.text.jobs import CompileGrammar
from router.text.work import TextWork
from router.tokens.tokenizer import Tokenizer
from tests.fakes.text_workers import InProcess
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import delta

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def _body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {**prompt, **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_grammar_reaches_the_nodes_and_is_compiled_once(
    serve: Serve, tokenizer: Tokenizer, path: str
) -> None:
    workers = InProcess(TextWork(tokenizer, ChatTemplate(TINY)))
    rig = await serve(workers=workers)
    rig.generator.will(delta([5, 2], "stop"))
    for _ in range(3):
        status, _, _ = await rig.post(path, _body(path, response_format=FORMAT, ignore_eos=True))
        assert status == 200
    assert [job for job, _ in workers.jobs if isinstance(job, CompileGrammar)] == [
        CompileGrammar(SERVED.vocab_size, SERVED.eos_token_ids, "response_format.json_schema")
    ]
    for request in rig.generator.requests:
        assert json.loads(request.sampling.grammar)["grammars"][0]["json_schema"]["type"] == "integer"
        assert set(SERVED.eos_token_ids) <= set(request.sampling.stop_token_ids), (
            "the answer ends with its grammar"
        )


async def test_free_requests_cause_no_work(serve: Serve, tokenizer: Tokenizer) -> None:
    workers = InProcess(TextWork(tokenizer, ChatTemplate(TINY)))
    rig = await serve(workers=workers)
    rig.generator.will(delta([5, 2], "stop"))
    assert (await rig.post(TEXT, _body(TEXT)))[0] == 200
    assert workers.jobs == []
    assert rig.generator.requests[0].sampling.grammar == ""


@pytest.mark.parametrize("large", [False, True])
async def test_a_large_body_has_the_same_constraint(rig: Rig, large: bool) -> None:
    rig.generator.will(delta([5, 2], "stop"))
    schema = {"const": 2**70}
    body = _body(CHAT, guided_json=schema, user="u" * (1 << 17 if large else 1))
    assert (await rig.post(CHAT, body))[0] == 200
    assert str(2**70) in rig.generator.requests[0].sampling.grammar


async def test_the_last_token_of_a_complete_grammar_is_text(rig: Rig) -> None:
    """Nodes end such an answer without a stop token."""
    ids = rig.tokenizer.encode("[1]", add_special_tokens=False)
    rig.generator.will(delta(ids, "stop"))
    _, answer, _ = await rig.post(TEXT, _body(TEXT, regex=r"\[1\]"))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("[1]", "stop")
    rig.generator.will(delta([*ids, SERVED.eos_token_ids[0]], "stop"))
    _, answer, _ = await rig.post(TEXT, _body(TEXT, regex=r"\[1\]"))
    assert answer["choices"][0]["text"] == "[1]"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"regex": "a("}, "invalid_grammar", "regex"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "invalid_value", "ebnf"),
        ({"regex": "a", "min_tokens": 2}, "invalid_value", "min_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "invalid_grammar",
            "response_format.json_schema",
        ),
    ],
)
async def test_refusals(rig: Rig, fields: dict[str, Any], code: str, param: str) -> None:
    status, answer, _ = await rig.post(CHAT, _body(CHAT, **fields))
    assert (status, answer["error"]["param"]) == (400, param)
    assert rig.generator.requests == []


async def test_every_hostile_schema_of_a_process_is_refused_in_a_worker(rig: Rig) -> None:
    """The worst shapes that the limits let through to llguidance, and those that they stop before."""
    hostile: list[Any] = [
        {"properties": {f"p{i}": {"type": "string"} for i in range(4000)}},
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"multipleOf": prime} for prime in (97, 89, 83)]},
        {"$ref": "https://example.com/x"},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(6)]} for i in range(6)]},
        {"not": {}},
    ]
    for schema in hostile:
        status, answer, _ = await rig.post(CHAT, _body(CHAT, json_schema=schema))
        assert (status, answer["error"]["param"]) == (400, "json_schema"), schema
