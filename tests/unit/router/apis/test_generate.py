"""SGLang's /generate over HTTP: what each field becomes, and the shape of answers and streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from common.errors import NodeLost
from common.grammar.token_marker import TokenMarker
from common.messages.generation import OutputToken, PromptLogprob
from router.chat.answer_style import AnswerStyle
from router.dispatch.generation import GenerationRequest, TakeNow, TokenDelta, take_nothing
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

HELLO = [331, 300, 301]


def events(raw: bytes) -> list[Any]:
    *lines, last, end = raw.decode().split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_text(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    sampling = {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_new_tokens": 2,
        "sampling_seed": 9,
        "stop_token_ids": [4],
        "logit_bias": {"5": 1.5},
        "frequency_penalty": 0.5,
    }
    status, answer, headers = await rig.post(
        "/generate", {"text": "Hello", "sampling_params": sampling, "rid": "mine/1"}
    )
    assert status == 200
    assert headers["x-request-id"] == "mine/1"
    seconds = answer["meta_info"].pop("e2e_latency")
    assert seconds >= 0
    assert answer == {
        "text": rig.tokenizer.decode(HELLO, True),
        "output_ids": HELLO,
        "meta_info": {
            "id": "mine/1",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": len(rig.tokenizer.encode("Hello", True)),
            "completion_tokens": 3,
            "reasoning_tokens": 0,
            "cached_tokens": 3,
            "weight_version": "default",
        },
    }
    [asked] = rig.generator.requests
    params = asked.sampling
    assert asked.request_id == "mine/1"
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 5)
    assert (params.min_tokens, params.seed, params.stop_token_ids) == (2, 9, (2, 4))
    assert (params.logit_bias, params.frequency_penalty) == (((5, 1.5),), 0.5)


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_steps_that_verified_drafts(serve: Serve, padding: int) -> None:
    """As SGLang's benchmarks read them, in the last event of a stream, too; also if a stop string ends the answer."""
    rig = await serve()
    scripted = rig.generator.generate

    async def generate(
        request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncIterator[TokenDelta]:
        for start, tokens in ((1, 3), (5, 2), (7, 1)):
            request.steps.add(start, tokens)
        async for each in scripted(request, take_now):
            yield each

    rig.generator.generate = generate  # type: ignore[method-assign, assignment]
    said = rig.tokenizer.encode("one two three four", False)[:8]
    assert len(said) == 8
    texts = [rig.tokenizer.decode([each], True) for each in said]
    rig.generator.will(
        delta(said[:1], cached=3), delta(said[1:4]), delta(said[4:5]), delta(said[5:], "length")
    )
    found = []
    for stop, count in ((None, 8), ("".join(texts[4:6]), 6), ("".join(texts[1:3]), 3), (texts[0], 1)):
        body = {"text": "Hello", "sampling_params": {"stop": stop}}
        raw = json.dumps(body).encode() + b" " * padding
        _, answer, _ = await rig.post("/generate", raw)
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == count
        found.append((meta.get("spec_verify_ct"), meta.get("spec_accept_length")))
        *_, end = events(await rig.raw("/generate", body | {"stream": True}))
        assert (end["meta_info"].get("spec_verify_ct"), end["meta_info"].get("spec_accept_length")) == found[
            -1
        ]
    assert found == [(3, 2.0), (2, 2.0), (1, 2.0), (None, None)]
    first, *_ = events(await rig.raw("/generate", {"text": "Hello", "stream": True}))
    assert "spec_verify_ct" not in first["meta_info"]


async def test_tokens_of_reasoning(serve: Serve, tokenizer: Tokenizer) -> None:
    """The prompt or one of the first tokens opens it; the markers count, as in SGLang, and what follows does not."""
    marks = [TokenMarker(tokenizer.tokens_within(each), tokenizer.symbols_of) for each in ("<t>", "</t>")]
    rig = await serve(served=replace(SERVED, answers=AnswerStyle(think_markers=(marks[0], marks[1]))))
    for prompt, thought, rest in (
        ("Hm", "", "I know.</t> So"),
        ("Hm", "<t>I think.</t>", " So</t>"),
        ("Hm", "\n<t>I think.</t>", " So <t>"),
        ("Hm", "<t>I think", ""),
        ("Hm<t>", "I think.</t>", " So<t>no</t>"),
        ("Hm<t>I", "think", ""),
        ("Hm<t>I</t>", "", "think.</t>"),
        ("Hm", "", "So it is, and then I write <t>no</t>"),
        ("Hm", "", ""),
    ):
        ids, more = (tokenizer.encode(each, False) for each in (thought, rest))
        rig.generator.scripts = [[*one_by_one([*ids, *more] or [2])]]
        body = {"text": prompt, "sampling_params": {"ignore_eos": True}}
        _, answer, _ = await rig.post("/generate", body)
        assert answer["meta_info"]["reasoning_tokens"] == len(ids), (prompt, thought, rest)
        streamed = events(await rig.raw("/generate", body | {"stream": True}))
        told = [
            (event["meta_info"]["completion_tokens"], event["meta_info"]["reasoning_tokens"])
            for event in streamed
        ]
        assert told[-1][1] == len(ids)
        opened = len(ids) - len(tokenizer.encode(thought.removeprefix("\n<t>").removeprefix("<t>"), False))
        for tokens, reasoning in told:
            assert reasoning == (min(tokens, len(ids)) if tokens >= opened else 0)


async def test_defaults(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    for prompt in ({"input_ids": [1, 5, 6]}, {"input_ids": [5] * 4090}):
        assert (await rig.post("/generate", prompt))[0] == 200
    assert [asked.sampling.max_tokens for asked in rig.generator.requests] == [128, 6]


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_a_length_of_null_is_what_the_context_leaves(rig: Rig, padding: int) -> None:
    """As in SGLang, where only a request without the field has the default."""
    rig.generator.will(*one_by_one(HELLO))
    free, short = {"max_new_tokens": None}, {"max_new_tokens": 3}
    for prompts, sampling in (
        ([5] * 6, free),
        ([5] * 4090, free),
        ([[5] * 6, [5] * 7, [5]], [free, {}, short]),
    ):
        raw = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode() + b" " * padding
        status, answer, _ = await rig.post("/generate", raw)
        assert status == 200, answer
    asked = [(len(each.token_ids), each.sampling.max_tokens) for each in rig.generator.requests]
    assert sorted(asked) == [(1, 3), (6, 4090), (6, 4090), (7, 128), (4090, 6)]


async def test_a_higher_priority_goes_first_here(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    for priority in (3, -3, 0):
        assert (await rig.post("/generate", {"text": "Hello", "priority": priority}))[0] == 200
    assert [asked.priority for asked in rig.generator.requests] == [-3, 3, 0]


async def test_a_salt_has_two_names(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    for salt in ({}, {"extra_key": "k"}, {"cache_salt": "k"}):
        assert (await rig.post("/generate", {"text": "Hello"} | salt))[0] == 200
    none, extra, own = (asked.salt for asked in rig.generator.requests)
    assert none != extra == own


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[5, 6], [7]]}])
async def test_several_prompts_give_a_list(rig: Rig, prompts: dict[str, Any]) -> None:
    rig.generator.will(*one_by_one(HELLO))
    _, answer, _ = await rig.post("/generate", {**prompts, "rid": "r"})
    assert [each["meta_info"]["id"] for each in answer] == ["r", "r-1"]
    assert [each["output_ids"] for each in answer] == [HELLO, HELLO]
    streamed = events(await rig.raw("/generate", {**prompts, "stream": True}))
    assert {event["index"] for event in streamed} == {0, 1}


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_each_prompt_may_have_an_id_of_its_own(rig: Rig, padding: int) -> None:
    rig.generator.will(*one_by_one(HELLO))
    body = {"text": ["a", "b"], "rid": ["x", "y 7"], "sampling_params": {"n": 2, "temperature": 1}}
    header = {"X-Request-Id": "whole"}
    raw = json.dumps(body).encode() + b" " * padding
    _, answer, headers = await rig.post("/generate", raw, header)
    assert [each["meta_info"]["id"] for each in answer] == ["x", "x-1", "y7", "y7-1"]
    assert headers["x-request-id"] == "whole"
    known = {each.request_id: each.known_as for each in rig.generator.requests}
    assert known == {
        "x": ("whole",),
        "x-1": ("x", "whole"),
        "y7": ("whole",),
        "y7-1": ("y7", "whole"),
    }
    streamed = events(await rig.raw("/generate", {**body, "stream": True}, header))
    assert {event["meta_info"]["id"] for event in streamed} == set(known)


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_sampling_params_of_each_prompt(rig: Rig, padding: int) -> None:
    rig.generator.will(*one_by_one(HELLO))
    items = [
        {"max_new_tokens": 3, "temperature": 0.5, "stop": ["x"], "n": 2, "sampling_seed": 5},
        {"temperature": 1, "regex": "a+", "n": 2},
        {"max_new_tokens": 7, "stop_token_ids": [9], "n": 2, "spaces_between_special_tokens": False},
    ]
    body = {"text": ["a", "b", "c"], "sampling_params": items, "extra_key": "k", "priority": 2}
    status, answer, _ = await rig.post("/generate", json.dumps(body).encode() + b" " * padding)
    assert status == 200, answer
    assert [each["meta_info"]["id"][-2:] for each in answer[1:]] == [f"-{n}" for n in range(1, 6)]
    asked = sorted(rig.generator.requests, key=lambda each: (len(each.request_id), each.request_id))
    assert [each.sampling.max_tokens for each in asked] == [3, 3, 128, 128, 7, 7]
    assert [each.sampling.temperature for each in asked] == [0.5, 0.5, 1, 1, 1, 1]
    assert [each.sampling.seed for each in asked[:2]] == [5, 6]
    assert ["a+" in each.sampling.grammar for each in asked] == [False, False, True, True, False, False]
    assert [each.sampling.stop_token_ids for each in asked[4:]] == [(2, 9)] * 2
    assert {(each.salt, each.priority) for each in asked} == {(asked[0].salt, -2)}


async def test_an_item_without_n_has_one_answer_as_n_1_says(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    status, answer, _ = await rig.post("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"n": 1}]})
    assert (status, len(answer)) == (200, 2), answer


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{}], "sampling_params"),
        ([], "sampling_params"),
        ([{}, {}, {}], "sampling_params"),
        ([{}, {"n": 2}], "sampling_params[1].n"),
        ([{}, {"temperature": -1}], "sampling_params[1].temperature"),
        ([{}, {"max_new_tokens": 0}], "sampling_params[1].max_new_tokens"),
        ([{"stop": [""]}, {}], "sampling_params[0].stop"),
        ([{}, {"stop_regex": "x"}], "sampling_params[1].stop_regex"),
        ([{}, {"regex": "("}], "sampling_params[1].regex"),
        ([{}, {"misspelt": 1}], "sampling_params[1].misspelt"),
        ([{}, {"logit_bias": {"x": 1}}], "sampling_params[1].logit_bias"),
    ],
)
async def test_refusals_name_the_prompts_own_field(
    serve: Serve, items: list[dict[str, Any]], param: str
) -> None:
    rig = await serve(strict_fields=True)
    rig.generator.will(*one_by_one(HELLO))
    for padding in (b"", b" " * (1 << 16)):
        raw = json.dumps({"text": ["a", "b"], "sampling_params": items}).encode() + padding
        status, answer, _ = await rig.post("/generate", raw)
        assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_stream_repeats_the_text_so_far(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    found = events(await rig.raw("/generate", {"text": "Hello", "stream": True}))
    texts = [rig.tokenizer.decode(HELLO[:count], True) for count in (1, 2, 3)]
    assert [event["text"] for event in found] == texts
    assert [event["output_ids"] for event in found] == [HELLO[:1], HELLO[:2], HELLO]
    assert [event["meta_info"]["finish_reason"] for event in found] == [
        None,
        None,
        {"type": "length", "length": 3},
    ]


async def test_the_size_of_a_stream_is_not_quadratic(rig: Rig) -> None:
    rig.generator.will(*one_by_one([331] * 3000))
    found = events(await rig.raw("/generate", {"text": "Hello", "stream": True}))
    assert len(found) < 400
    assert len(found[-1]["output_ids"]) == 3000
    assert [len(event["output_ids"]) for event in found[:64]] == list(range(1, 65))


async def test_log_probabilities(rig: Rig) -> None:
    rig.generator.will(*one_by_one([331], top=3))
    body = {"text": "Hello", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    _, answer, _ = await rig.post("/generate", body)
    text = rig.tokenizer.token_text
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 331, text(331)]]
    assert meta["output_top_logprobs"] == [[[-0.5, 331, text(331)], [-1.5, 332, text(332)]]]
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])
    assert meta["output_token_logprobs_length"] == 1
    _, answer, _ = await rig.post("/generate", {"text": "Hello", "return_logprob": True})
    assert answer["meta_info"]["output_token_logprobs"] == [[-0.5, 331, None]]
    assert answer["meta_info"]["output_top_logprobs"] == [None]


@pytest.mark.parametrize(
    ("stop", "steps", "finish"),
    [
        ([], [delta([331, 2], "stop", 0)], {"type": "stop", "matched": 2}),
        ([], [delta([331], None, 0), delta([2], "stop")], {"type": "stop", "matched": 2}),
        (["$"], [delta([331], None, 0), delta([10], None), 60.0], {"type": "stop", "matched": "$"}),
        ([], [delta([331], None, 0), delta([], "abort")], {"type": "abort"}),
    ],
)
async def test_finish_reasons(rig: Rig, stop: list[str], steps: list[Any], finish: dict[str, Any]) -> None:
    assert rig.tokenizer.token_text(10) == "$"
    rig.generator.will(*steps)
    _, answer, _ = await rig.post("/generate", {"text": "Hello", "sampling_params": {"stop": stop}})
    found = answer["meta_info"]["finish_reason"]
    assert {name: found[name] for name in finish} == finish


async def test_an_error_in_the_stream_ends_it_without_done(rig: Rig) -> None:
    rig.generator.will(delta([331], None, 0), NodeLost("the node is gone"))
    raw = await rig.raw("/generate", {"text": "Hello", "stream": True})
    last = json.loads(raw.decode().split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["code"] == "node_lost"
    assert b"[DONE]" not in raw


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [704]}, "input_ids"),
        ({"text": ["x"] * 65}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "modalities": ["image"]}, "modalities"),
        ({"text": "a", "cache_salt": "x", "extra_key": "y"}, "cache_salt"),
        ({"text": "a", "max_thinking_tokens": 5}, "max_thinking_tokens"),
        ({"text": "a", "require_reasoning": True}, "require_reasoning"),
        ({"text": "a", "return_flat_raw_top_logprobs": True}, "return_flat_raw_top_logprobs"),
        ({"text": "a", "sampling_params": {"beam_width": 4}}, "sampling_params.beam_width"),
        ({"text": "a", "rid": ["a"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["a"]}, "rid"),
        ({"text": ["a"], "rid": []}, "rid"),
        ({"text": ["a", "b"], "rid": ["a", "a\n"]}, "rid[1]"),
        ({"text": ["a"], "rid": [" "]}, "rid[0]"),
        ({"text": ["a"], "rid": [7]}, "rid[0]"),
        ({"text": "a", "model": "other"}, "model"),
    ],
)
async def test_refusals_name_the_clients_field(rig: Rig, body: dict[str, Any], param: str) -> None:
    rig.generator.will(*one_by_one(HELLO))
    for padding in (b"", b" " * (1 << 16)):
        status, answer, _ = await rig.post("/generate", json.dumps(body).encode() + padding)
        assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)
        assert "max_tokens" not in answer["error"]["message"]


async def test_large_bodies_are_read_by_text_workers_with_the_same_result(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    small = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
    _, answer, _ = await rig.post("/generate", small)
    raw = json.dumps(small).encode() + b" " * (1 << 16)
    _, again, _ = await rig.post("/generate", raw)
    for each in (answer, again):
        del each["meta_info"]["id"], each["meta_info"]["e2e_latency"]
    assert again == answer
    first, second = rig.generator.requests
    assert list(second.token_ids) == list(first.token_ids)


def scored(*ids: int, chosen: tuple[float, ...] = ()) -> TokenDelta:
    """The first delta of an answer, with the log-probabilities of a prompt: -0.25 * position."""
    made = delta([331], "length", 0, 2)
    made.prompt_logprobs = [
        PromptLogprob(-0.25 * at, 3, (token + 1, token + 2), (-0.1, -0.2), chosen)
        for at, token in enumerate(ids)
        if at
    ]
    return made


@pytest.mark.parametrize("start", [0, 1, 3, 4])
async def test_log_probabilities_of_the_prompt(start: int, rig: Rig) -> None:
    """SGLang's form: from the position on, the first without a value; a stream lists them in its last event."""
    ids = [5, 6, 7, 8]
    rig.generator.will(scored(*ids))
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
    _, answer, _ = await rig.post("/generate", body)
    meta = answer["meta_info"]
    values = [None, *(-0.25 * at for at in range(start + 1, 4))][: 4 - start]
    assert meta["input_token_logprobs"] == [
        [v, token, None] for v, token in zip(values, ids[start:], strict=True)
    ]
    tops = [None, *([[-0.1, token + 1, None]] for token in ids[start + 1 :])][: 4 - start]
    assert meta["input_top_logprobs"] == tops
    assert meta["output_token_logprobs"] == [[-0.5, 331, None]]
    assert (answer["output_ids"], meta["prompt_tokens"], meta["completion_tokens"]) == ([331], 4, 1)
    assert answer["text"] == rig.tokenizer.decode([331], False)
    assert rig.generator.requests[-1].sampling.prompt_logprobs == 1
    streamed = events(await rig.raw("/generate", {**body, "stream": True}))
    assert streamed[-1]["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]
    assert len(streamed) == 1


async def test_log_probabilities_of_named_tokens_at_each_place_of_the_prompt(rig: Rig) -> None:
    first = scored(5, 6, 7, chosen=(-2.0, -3.0))
    found = first.tokens[0].logprob
    assert found is not None
    first.tokens = [OutputToken(331, structs.replace(found, chosen=(-4.0, -5.0)))]
    rig.generator.will(first)
    body = {
        "input_ids": [5, 6, 7],
        "return_logprob": True,
        "logprob_start_len": 1,
        "token_ids_logprob": [9, 4],
    }
    _, answer, _ = await rig.post("/generate", body)
    meta = answer["meta_info"]
    assert meta["input_token_ids_logprobs"] == [None, [[-2.0, 9, None], [-3.0, 4, None]]]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 9, None], [-5.0, 4, None]]]
    sampling = rig.generator.requests[-1].sampling
    assert (sampling.prompt_logprobs, sampling.logprob_ids) == (0, (9, 4))
    streamed = events(await rig.raw("/generate", {**body, "stream": True}))
    assert streamed[-1]["meta_info"]["input_token_ids_logprobs"] == meta["input_token_ids_logprobs"]


async def test_a_prompt_is_scored_without_an_answer(rig: Rig) -> None:
    rig.generator.will(scored(5, 6))
    body = {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 0}
    _, answer, _ = await rig.post("/generate", {**body, "sampling_params": {"max_new_tokens": 0}})
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-0.25, 6, None]]
    assert meta["input_top_logprobs"] == [None, None]
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}


@pytest.mark.parametrize("first", [0, 3])
async def test_each_text_leaves_room_for_its_own_answer(rig: Rig, tokenizer: Tokenizer, first: int) -> None:
    text = "Hello"
    while (missing := SERVED.max_model_len - len(tokenizer.encode(text, True))) > 0:
        text += "," * missing
    rig.generator.will(scored(*tokenizer.encode(text, True)))
    items = [{"max_new_tokens": first}, {"max_new_tokens": 0}]
    body = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": items}
    status, answer, _ = await rig.post("/generate", {**body, "text": ["Hello", text]})
    assert status == 200, answer
    assert answer[1]["meta_info"]["prompt_tokens"] == SERVED.max_model_len
    items.reverse()
    status, answer, _ = await rig.post("/generate", {**body, "text": [text, "Hello"]})
    assert status == 200, answer
    items[0]["max_new_tokens"] = 1
    status, answer, _ = await rig.post("/generate", {**body, "text": [text, "Hello"]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded"), answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"logprob_start_len": 3, "return_logprob": True}, "logprob_start_len"),
        ({"logprob_start_len": [0], "return_logprob": True}, "logprob_start_len"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    ],
)
async def test_what_cannot_be_scored_is_refused(fields: dict[str, Any], param: str, rig: Rig) -> None:
    rig.generator.will(scored(5, 6))
    status, answer, _ = await rig.post("/generate", {"input_ids": [5, 6], **fields})
    assert (status, answer["error"]["param"]) == (400, param)
