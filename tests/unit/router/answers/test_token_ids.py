"""`return_token_ids` and `return_tokens_as_token_ids`, against a scripted generator."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


async def chunks(rig: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    raw = (await rig.raw(path, {**body, "stream": True})).decode().split("\n\n")
    return [json.loads(line[6:]) for line in raw[:-2]]


async def test_a_complete_completion(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11, 2], "stop"))
    body = {"prompt": [[5, 6], [7]], "return_token_ids": True}
    _, answer, _ = await rig.post(TEXT, body)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10, 11, 2], [10, 11, 2]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5, 6], [7]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    _, plain, _ = await rig.post(TEXT, {**body, "return_token_ids": False})
    assert not {"token_ids", "prompt_token_ids"} & (plain.keys() | plain["choices"][0].keys())
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]


async def test_a_complete_chat(rig: Rig) -> None:
    rig.generator.will(*one_by_one([10, 11]))
    _, answer, _ = await rig.post(CHAT, {**MESSAGES, "return_token_ids": True, "n": 2})
    assert answer["prompt_token_ids"] == list(rig.generator.requests[0].token_ids)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[10, 11], [10, 11]]
    assert "prompt_token_ids" not in answer["choices"][0]


async def test_a_streamed_completion(rig: Rig) -> None:
    """Text that a stop string holds back delays ids, and loses none."""
    ids = rig.tokenizer.encode("some text EN and more", add_special_tokens=False)
    rig.generator.will(*one_by_one(ids))
    body = {"prompt": [5, 6], "return_token_ids": True, "stop": "END", "max_tokens": 99}
    found = await chunks(rig, TEXT, body)
    told = [choice for chunk in found for choice in chunk["choices"]]
    assert [token for choice in told for token in choice["token_ids"]] == ids
    assert [choice.get("prompt_token_ids") for choice in told] == [[5, 6]] + [None] * (len(told) - 1)
    plain = await chunks(rig, TEXT, {**body, "return_token_ids": False})
    assert [each["choices"][0]["text"] for each in plain] == [choice["text"] for choice in told]


async def test_a_streamed_chat(rig: Rig) -> None:
    rig.generator.will(delta([10, 11], cached=1), delta([12, 2], "stop"))
    body = {**MESSAGES, "return_token_ids": True, "stream_options": {"include_usage": True}}
    opening, *middle, last = await chunks(rig, CHAT, body)
    assert opening["prompt_token_ids"] == list(rig.generator.requests[0].token_ids)
    told = [choice for chunk in middle for choice in chunk["choices"]]
    assert [token for choice in told for token in choice["token_ids"]] == [10, 11, 12, 2]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_named_by_ids(rig: Rig, stream: bool) -> None:
    rig.generator.will(*one_by_one([10, 11], top=2))
    body = {"prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": True}
    answers = await chunks(rig, TEXT, body) if stream else [(await rig.post(TEXT, body))[1]]
    listed = [answer["choices"][0]["logprobs"] for answer in answers]
    assert [name for each in listed for name in each["tokens"]] == ["token_id:10", "token_id:11"]
    assert [top for each in listed for top in each["top_logprobs"]] == [
        {"token_id:10": -0.5},
        {"token_id:11": -0.5},
    ]
    chat = {**MESSAGES, "logprobs": True, "return_tokens_as_token_ids": True}
    _, answer, _ = await rig.post(CHAT, chat)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], bytes(first["bytes"])) == ("token_id:10", rig.tokenizer.token_bytes(10))
