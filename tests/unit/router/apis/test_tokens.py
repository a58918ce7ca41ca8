"""vLLM's /inference/v1/generate over HTTP: tokens in, tokens out, complete and streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from common.checkpoint.generation_config import DefaultSampling
from common.messages.generation import OutputToken, PromptLogprob, TokenLogprob
from router.dispatch.generation import TokenDelta
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7]
LARGE = b" " * (1 << 16)  # such bodies are read by text workers


def body(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": sampling}


async def streamed(rig: Rig, asked: dict[str, Any]) -> list[Any]:
    raw = (await rig.raw(PATH, asked | {"stream": True})).decode()
    *lines, last, end = raw.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("padding", [b"", LARGE])
async def test_a_whole_answer(rig: Rig, padding: bytes) -> None:
    rig.generator.will(*one_by_one([331, 300, 2], "stop"))
    asked = body(max_tokens=9, seed=3, stop_token_ids=[4], min_tokens=1, logit_bias={"5": 1.5}, top_k=5)
    raw = json.dumps(asked | {"request_id": "mine", "model": "tiny-target", "priority": -3}).encode()
    status, answer, headers = await rig.post(PATH, raw + padding)
    assert status == 200, answer
    assert headers["x-request-id"] == "mine"
    assert answer.pop("created") > 0
    assert answer == {
        "request_id": "generate-tokens-mine",
        "model": "tiny-target",
        "choices": [{"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": [331, 300, 2]}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "prompt_logprobs": None,
    }
    [request] = rig.generator.requests
    assert (list(request.token_ids), request.priority) == (PROMPT, -3)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop_token_ids) == (9, 3, (2, 4))
    assert (sampling.min_tokens, sampling.logit_bias, sampling.top_k) == (1, ((5, 1.5),), 5)


async def test_the_defaults_are_vllms(serve: Serve) -> None:
    """Those of its SamplingParams, and for the length what the context leaves."""
    rig = await serve(served=replace(SERVED, defaults=DefaultSampling(temperature=0.2, top_k=7, top_p=0.5)))
    rig.generator.will(*one_by_one([331]))
    assert (await rig.post(PATH, body()))[0] == 200
    [request] = rig.generator.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.max_tokens == SERVED.max_model_len - len(PROMPT)


async def test_a_stream_has_the_tokens_as_they_arrive(rig: Rig) -> None:
    rig.generator.will(delta([331, 300], cached=2), delta([301]), delta([2], "stop"))
    asked = body() | {"request_id": "r", "stream_options": {"include_usage": True}}
    *chunks, last = await streamed(rig, asked)
    assert {each["request_id"] for each in (*chunks, last)} == {"generate-tokens-r"}
    choices = [choice for each in chunks for choice in each["choices"]]
    assert [each["token_ids"] for each in choices] == [[331, 300], [301], [2]]
    assert [each["finish_reason"] for each in choices] == [None, None, "stop"]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 4)


async def test_tokens_of_a_stop_string_are_told_while_its_text_is_held_back(rig: Rig) -> None:
    first, dollar = rig.tokenizer.encode("a$", add_special_tokens=False)
    rig.generator.will(delta([first]), delta([dollar]), 300.0)
    asked = body(stop=["a$"])
    chunks = await streamed(rig, asked)
    assert [each["choices"][0]["token_ids"] for each in chunks] == [[first], [dollar]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    _, answer, _ = await rig.post(PATH, asked)
    assert answer["choices"][0]["token_ids"] == [first, dollar]


async def test_several_choices(rig: Rig) -> None:
    rig.generator.scripts = [one_by_one([331]), one_by_one([300], "stop")] * 2
    _, answer, _ = await rig.post(PATH, body(n=2))
    assert [each["token_ids"] for each in answer["choices"]] == [[331], [300]]
    assert [each["finish_reason"] for each in answer["choices"]] == ["length", "stop"]
    chunks = await streamed(rig, body(n=2))
    assert {each["choices"][0]["index"] for each in chunks} == {0, 1}


async def test_log_probabilities_name_tokens_by_their_ids(rig: Rig) -> None:
    token = OutputToken(331, TokenLogprob(-0.5, (331, 300), (-0.5, -float("inf"))))
    rig.generator.will(TokenDelta([token], "length", 0))
    _, answer, _ = await rig.post(PATH, body(logprobs=2))
    [found] = answer["choices"][0]["logprobs"]["content"]
    assert (found["token"], found["logprob"]) == ("token_id:331", -0.5)
    listed = [(each["token"], each["logprob"]) for each in found["top_logprobs"]]
    assert listed == [("token_id:331", -0.5), ("token_id:300", -9999.0)]
    [chunk] = await streamed(rig, body(logprobs=2))
    assert chunk["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]


@pytest.mark.parametrize("padding", [b"", LARGE])
async def test_log_probabilities_of_the_prompt(rig: Rig, padding: bytes) -> None:
    scores = [PromptLogprob(-0.5, 1, (6,), (-0.5,)), PromptLogprob(-2.0, 3, (8,), (-0.25,))]
    rig.generator.will(TokenDelta([OutputToken(331)], "length", 0, scores))
    # As vLLM writes such a request.
    asked = body(prompt_logprobs=1, skip_reading_prefix_cache=True)
    _, answer, _ = await rig.post(PATH, json.dumps(asked).encode() + padding)
    text = rig.tokenizer.token_text
    assert answer["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -0.5, "rank": 1, "decoded_token": text(6)}},
        {
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": text(8)},
            "7": {"logprob": -2.0, "rank": 3, "decoded_token": text(7)},
        },
    ]
    assert answer["choices"][0]["token_ids"] == [331]


NO_EFFECT = {
    "detokenize": False,
    "extra_args": {},
    "flat_logprobs": False,
    "skip_clone": True,
    "skip_reading_prefix_cache": False,
}


# vLLM's rendered requests have 1 if they stream, otherwise 2.
@pytest.mark.parametrize("output_kind", [0, 1, 2])
async def test_what_has_no_effect_is_taken(output_kind: int, serve: Serve) -> None:
    rig = await serve(strict_fields=True)
    rig.generator.will(*one_by_one([331]))
    rendered: dict[str, Any] = {
        "features": None,
        "kv_transfer_params": {},
        "token_offsets": [[0, 1]],
        "assistant_tokens_mask": [0],
    }
    status, answer, _ = await rig.post(PATH, body(output_kind=output_kind, **NO_EFFECT) | rendered)
    assert status == 200, answer


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"token_ids": []}, "token_ids", ""),
        ({"token_ids": [SERVED.vocab_size]}, "token_ids", "token ids must be"),
        ({"token_ids": [-1]}, "token_ids", "token ids must be"),
        ({"token_ids": [5] * 5000}, "token_ids", "maximum context length"),
        ({"token_ids": ["a"]}, "token_ids[0]", ""),
        ({"features": {"mm_hashes": {}}}, "features", "send the images in a chat"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params", "among themselves"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs", "between 0 and 20"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature", "at least 0"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens", "at least 1"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop", ""),
        ({"sampling_params": {"flat_logprobs": True}}, "sampling_params.flat_logprobs", "not supported"),
        (
            {"sampling_params": {"skip_reading_prefix_cache": True}},
            "sampling_params.skip_reading_prefix_cache",
            "send false",
        ),
        (
            {"sampling_params": {"repetition_detection": {"min_count": 3}}},
            "sampling_params.repetition_detection",
            "send frequency_penalty",
        ),
        ({"sampling_params": {"misspelt": 1}}, "sampling_params.misspelt", ""),
        ({"sampling_params": None}, "sampling_params", ""),
        ({"model": "other"}, "model", ""),
    ],
)
async def test_refusals_name_the_clients_field(
    serve: Serve, fields: dict[str, Any], param: str, said: str
) -> None:
    rig = await serve(strict_fields=True)
    for padding in (b"", LARGE):
        status, answer, _ = await rig.post(PATH, json.dumps(body() | fields).encode() + padding)
        assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param), answer
        assert said in answer["error"]["message"]
