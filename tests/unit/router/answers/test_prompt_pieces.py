"""`echo` and `prompt_logprobs` over HTTP, against a scripted generator."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from msgspec.structs import replace

from common.messages.generation import PromptLogprob
from router.answers import choices, prompt_pieces
from router.answers.choices import MAX_SCORES
from router.dispatch.generation import TokenDelta
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LENGTH = SERVED.max_model_len


def scored(first: TokenDelta, prompt: list[int], top: int) -> TokenDelta:
    """Return the first delta with scores: token t has log-probability -t, and the likeliest tokens are 100, 101, ..."""
    scores = [
        PromptLogprob(
            -float(token), token, tuple(range(100, 100 + top)), tuple(-0.25 * i for i in range(top))
        )
        for token in prompt[1:]
    ]
    return replace(first, prompt_logprobs=scores)


async def streamed(rig: Rig, body: dict[str, Any]) -> list[Any]:
    raw = (await rig.raw(TEXT, {**body, "stream": True})).decode().split("\n\n")
    return [json.loads(line[6:]) for line in raw[:-2]]


@pytest.fixture(params=[1, 2, 128])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of the prompt per piece."""
    monkeypatch.setattr(prompt_pieces, "PIECE", request.param)


@pytest.mark.usefixtures("piece")
async def test_loglikelihood(rig: Rig) -> None:
    """The request of lm-eval: the sum of the log-probabilities of the prompt's end, and whether they are greedy."""
    prompt = [10, 20, 30]
    rig.generator.will(scored(delta([40], "length", cached=0, top=1), prompt, 1))
    body = {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    _, answer, _ = await rig.post(TEXT, body)
    [choice] = answer["choices"]
    text = rig.tokenizer.decode([*prompt, 40], False)
    names = [rig.tokenizer.token_text(token) for token in (*prompt, 40)]
    assert choice["text"] == text
    listed = choice["logprobs"]
    assert listed["tokens"] == names
    assert listed["token_logprobs"] == [None, -20.0, -30.0, -0.5]
    likeliest = rig.tokenizer.token_text(100)
    assert listed["top_logprobs"] == [
        None,
        {likeliest: 0.0, names[1]: -20.0},
        {likeliest: 0.0, names[2]: -30.0},
        {names[3]: -0.5},
    ]
    assert [text[at:] for at in listed["text_offset"]] == ["".join(names[i:]) for i in range(4)]
    assert answer["usage"]["completion_tokens"] == 1
    assert [each.sampling.prompt_logprobs for each in rig.generator.requests] == [1]


@pytest.mark.usefixtures("piece")
async def test_a_stream_has_the_same_columns(rig: Rig) -> None:
    prompt = [10, 20, 30]
    rig.generator.will(scored(delta([40], cached=0, top=2), prompt, 2), *one_by_one([41, 42], top=2))
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "return_token_ids": True}
    _, answer, _ = await rig.post(TEXT, body)
    whole = answer["choices"][0]
    chunks = [choice for event in await streamed(rig, body) for choice in event["choices"]]
    assert "".join(choice["text"] for choice in chunks) == whole["text"]
    for column, values in whole["logprobs"].items():
        told = [each for choice in chunks if choice["logprobs"] for each in choice["logprobs"][column]]
        assert told == values, column
    assert whole["token_ids"] == [40, 41, 42], "echoed tokens are not the answer's"
    assert [token for choice in chunks for token in choice["token_ids"]] == [40, 41, 42]


async def test_echo_without_log_probabilities(rig: Rig) -> None:
    rig.generator.will(*one_by_one([40, 41]))
    said = rig.tokenizer.decode([40, 41], False)
    for prompt, text in (("some  text", "some  text"), ([10, 20], rig.tokenizer.decode([10, 20], False))):
        _, answer, _ = await rig.post(TEXT, {"prompt": prompt, "echo": True})
        assert answer["choices"][0]["text"] == text + said
        assert "".join(
            e["choices"][0]["text"] for e in await streamed(rig, {"prompt": prompt, "echo": True})
        ) == (text + said)
    assert {each.sampling.prompt_logprobs for each in rig.generator.requests} == {None}


async def test_the_prompt_alone(rig: Rig) -> None:
    prompt = [10, 20]
    rig.generator.will(scored(delta([2], "stop", cached=0, top=1), prompt, 1))
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    _, answer, _ = await rig.post(TEXT, body)
    [choice] = answer["choices"]
    assert choice["text"] == rig.tokenizer.decode(prompt, False)
    assert choice["logprobs"]["token_logprobs"] == [None, -20.0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert rig.generator.requests[0].sampling.max_tokens == 1
    status, answer, _ = await rig.post(TEXT, {"prompt": prompt, "max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("form", ["ids", "many", "text"])
async def test_the_prompt_alone_may_fill_the_context(rig: Rig, form: str) -> None:
    """Nothing follows it. A body with many prompts is read by a text worker, which checks their length."""
    ids = [5 + each % 600 for each in range(LENGTH)]
    prompt: Any = {"ids": ids, "many": [ids] * 10, "text": "one two " * LENGTH}[form]
    sent = rig.tokenizer.encode(prompt, True)[-LENGTH:] if form == "text" else ids
    rig.generator.scripts = [[scored(delta([2], "length", cached=0, top=1), sent, 1)]]
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    if form == "text":
        body["truncate_prompt_tokens"] = -1
    status, answer, _ = await rig.post(TEXT, body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [None, *(-float(token) for token in sent[1:])]
    assert [list(each.token_ids) for each in rig.generator.requests] == [sent] * len(answer["choices"])
    assert {each.sampling.max_tokens for each in rig.generator.requests} == {1}


@pytest.mark.parametrize("count", [1, 10])
async def test_no_longer_prompt_is_echoed_and_none_that_fills_the_context_is_answered(
    rig: Rig, count: int
) -> None:
    for tokens, fields, reason in (
        (LENGTH + 1, {"max_tokens": 0}, f"the prompt has {LENGTH + 1}. Shorten the prompt."),
        (LENGTH, {"max_tokens": 1}, f"the prompt has {LENGTH}, which leaves no room for the completion."),
        (LENGTH, {}, f"the prompt has {LENGTH}, which leaves no room for the completion."),
        (LENGTH, {"max_tokens": 0, "echo": False}, f"the prompt has {LENGTH}, which leaves no room"),
    ):
        body = {"prompt": [[5] * tokens] * count, "echo": True, "logprobs": 1} | fields
        status, answer, _ = await rig.post(TEXT, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["message"].startswith(
            f"This model's maximum context length is {LENGTH} tokens; {reason}"
        )
    assert not rig.generator.requests


async def test_prompt_logprobs_of_a_completion(rig: Rig) -> None:
    prompt = [10, 101]
    rig.generator.will(scored(delta([40], "length", cached=0), prompt, 2))
    body = {"prompt": prompt, "prompt_logprobs": 2}
    _, answer, _ = await rig.post(TEXT, body)
    name = rig.tokenizer.token_text
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "100": {"logprob": 0.0, "rank": 1, "decoded_token": name(100)},
            "101": {"logprob": -0.25, "rank": 2, "decoded_token": name(101)},
        },
    ]
    assert answer["choices"][0]["text"] == name(40), "nothing is echoed"
    _, both, _ = await rig.post(TEXT, {**body, "return_token_ids": True, "prompt_logprobs": 0})
    assert both["choices"][0]["prompt_logprobs"] == [
        None,
        {"101": {"logprob": -101.0, "rank": 101, "decoded_token": name(101)}},
    ]
    assert both["choices"][0]["prompt_token_ids"] == prompt


async def test_prompt_logprobs_of_a_chat(rig: Rig) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    rig.generator.will(*one_by_one([40]))
    await rig.post(CHAT, messages)
    prompt = list(rig.generator.requests[0].token_ids)
    rig.generator.scripts = [[scored(delta([40], "length", cached=0), prompt, 1)]]
    _, answer, _ = await rig.post(CHAT, {**messages, "prompt_logprobs": 1, "n": 2})
    found = answer["prompt_logprobs"]
    assert found[0] is None
    assert [str(token) in entry for token, entry in zip(prompt[1:], found[1:], strict=True)] == [True] * (
        len(prompt) - 1
    )
    assert len(answer["choices"]) == 2


async def test_refusals(serve: Serve) -> None:
    rig = await serve(served=dataclasses.replace(SERVED, max_model_len=MAX_SCORES))
    for body, field in (
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [5] * 60_000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [5] * 60_000, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": [5] * 60_000, "echo": True, "logprobs": 0, "logprob_token_ids": [5] * 20}, "logprobs"),
    ):
        status, answer, _ = await rig.post(TEXT, body)
        assert (status, answer["error"]["param"]) == (400, field), answer


async def test_the_log_probabilities_of_a_prompt_are_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "MAX_SCORES", 8)
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1}
    for alternatives, allowed in ((1, True), (2, False)):
        rig.generator.scripts = [one_by_one([10])]
        rig.generator.requests.clear()
        await rig.post(TEXT, {**body, "prompt_logprobs": alternatives})
        assert len(rig.generator.requests) == allowed
