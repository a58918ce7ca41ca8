"""Constrained answers of a real cluster: the tokens of a reference that masks logits and takes the largest."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.grammar import GrammarCompiler, mask_width
from router.grammar.constraint import read_constraint
from router.grammar.fields import ConstraintFields
from router.grammar.grammar_text import grammar_text
from tests.cluster.harness import MODEL, RunningCluster

PROMPT = "Ada has 3 apples and buys 4 more. The answer in JSON: "
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FIELDS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": PERSON, "whitespace_pattern": " "}},
    {"regex": r"[A-Z][a-z]{2,6} has \d{1,3} (apples|pears)\."},
    {"structured_outputs": {"choice": ["positive", "negative", "neutral"]}},
    {"ebnf": 'root ::= "#### " [0-9] [0-9]? | "none"'},
]


def _reference(fields: dict[str, Any], prompt: list[int], most: int) -> list[int]:
    """Generate greedily under the mask of the grammar; the end of the text is not among the tokens."""
    constraint = read_constraint(msgspec.convert(fields, ConstraintFields))
    assert constraint is not None
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    vocab, eos = model.config.vocab_size, [2]
    compiler = GrammarCompiler((MODEL / "tokenizer.json").read_text(), vocab, eos)
    matcher = compiler.matcher(grammar_text(constraint))
    output: list[int] = []
    while len(output) < most and not matcher.stopped:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1]
        mask = np.zeros((1, mask_width(vocab)), dtype=np.int32)
        matcher.fill(mask, 0)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(bool)
        token = int(logits.where(torch.from_numpy(allowed), -torch.inf).argmax())
        assert matcher.accept([token])
        if token not in eos:
            output.append(token)
    return output


def _post(cluster: RunningCluster, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        cluster.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.timeout(900)
def test_answers_equal_a_masked_reference(cluster: RunningCluster) -> None:
    prompt = _post(cluster, "/tokenize", {"prompt": PROMPT})[1]["tokens"]
    for fields in FIELDS:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 80, "return_token_ids": True, **fields}
        _, answer = _post(cluster, "/v1/completions", body)
        [choice] = answer["choices"]
        ids = [token for token in choice["token_ids"] if token != 2]
        assert ids == _reference(fields, prompt, 80), (fields, choice["text"])
    hostile: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(4000)}}
    status, refused = _post(cluster, "/v1/completions", {"prompt": prompt, "json_schema": hostile})
    assert (status, refused["error"]["param"]) == (400, "json_schema")


@pytest.mark.timeout(900)
def test_typed_chats(cluster: RunningCluster) -> None:
    """Random and seeded: always valid, and the same twice."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Who?"}], "response_format": form, "max_tokens": 400}
    texts = []
    for seed in (1, 2, 1):
        status, answer = _post(cluster, "/v1/chat/completions", {**body, "seed": seed, "temperature": 0.7})
        assert status == 200, answer
        [choice] = answer["choices"]
        texts.append(choice["message"]["content"])
        if choice["finish_reason"] == "stop":
            person = json.loads(texts[-1])
            assert set(person) == set(PERSON["required"])
            assert 0 <= person["age"] <= 120
    assert texts[0] == texts[2]
