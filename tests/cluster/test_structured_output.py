"""Constrained answers of a real cluster: the tokens of a reference that masks logits and takes the largest."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.harness import RunningCluster
from tests.cluster.masked_reference import MaskedReference, Question

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
def test_answers_equal_a_masked_reference(cluster: RunningCluster, masked_reference: MaskedReference) -> None:
    prompt = _post(cluster, "/tokenize", {"prompt": PROMPT})[1]["tokens"]
    for fields in FIELDS:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 80, "return_token_ids": True, **fields}
        _, answer = _post(cluster, "/v1/completions", body)
        [choice] = answer["choices"]
        question = Question(prompt, fields, 0.0, 0, 80)
        found = masked_reference.difference(question, choice["token_ids"], choice["finish_reason"])
        assert found is None, (fields, choice["text"], str(found))
        free = replace(question, fields={})
        assert masked_reference.difference(free, choice["token_ids"], choice["finish_reason"]) is not None
    hostile: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(4000)}}
    status, refused = _post(cluster, "/v1/completions", {"prompt": prompt, "json_schema": hostile})
    assert (status, refused["error"]["param"]) == (400, "json_schema")


@pytest.mark.timeout(900)
def test_typed_chats(cluster: RunningCluster) -> None:
    """Random and seeded, at the same time: always valid, and the same twice."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Who?"}], "response_format": form, "max_tokens": 400}
    texts = []

    def ask(seed: int) -> tuple[int, Any]:
        return _post(cluster, "/v1/chat/completions", {**body, "seed": seed, "temperature": 0.7})

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(ask, (1, 2, 1)))
    for status, answer in answers:
        assert status == 200, answer
        [choice] = answer["choices"]
        texts.append(choice["message"]["content"])
        if choice["finish_reason"] == "stop":
            person = json.loads(texts[-1])
            assert set(person) == set(PERSON["required"])
            assert 0 <= person["age"] <= 120
    assert texts[0] == texts[2]
