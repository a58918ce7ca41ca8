"""OpenAI's /v1/responses over HTTP: conversations in, one object or numbered events out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidGrammar, NodeLost
from tests.unit.router.conftest import Rig
from tests.unit.router.scripted_generator import delta, one_by_one

HELLO = [331, 300, 301]
PATH = "/v1/responses"
IMAGE: dict[str, Any] = {
    "role": "user",
    "content": [
        {"type": "input_text", "text": "a"},
        {"type": "input_image", "image_url": "data:image/png;base64,"},
    ],
}
CALL: list[dict[str, Any]] = [
    {"role": "assistant", "content": "b"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "d"},
]
DEEP: dict[str, Any] = {}  # a schema that nests too deep
for _ in range(40):
    DEEP = {"a": DEEP}


def events(raw: bytes) -> list[dict[str, Any]]:
    *lines, end = raw.decode().split("\n\n")
    assert end == ""
    found = []
    for line in lines:
        kind, data = line.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


async def prompt_of(rig: Rig, messages: list[dict[str, Any]]) -> list[int]:
    _, found, _ = await rig.post("/tokenize", {"messages": messages})
    return list(found["tokens"])


async def test_a_text(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO, "stop"))
    body = {
        "input": "Hello",
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "store": True,
        "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
    }
    status, answer, headers = await rig.post(PATH, body)
    assert status == 200, answer
    identity = headers["x-request-id"]
    assert answer["id"] == f"resp_{identity}"
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny-target")
    assert (answer["store"], answer["max_output_tokens"], answer["instructions"]) == (False, 9, "Be brief.")
    assert answer["metadata"] == {"a": "b"}
    assert answer["created_at"] <= answer["completed_at"]
    # the stop token yields no text
    text = rig.tokenizer.decode(HELLO[:2], True)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    assert answer["output"] == [
        {
            "id": f"msg_{identity}_0",
            "status": "completed",
            "type": "message",
            "role": "assistant",
            "content": [part],
        }
    ]
    [asked] = rig.generator.requests
    count = len(asked.token_ids)
    assert answer["usage"] == {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count + 3,
    }
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert list(asked.token_ids) == await prompt_of(rig, messages)
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.seed) == (9, 0.5, 3)


async def test_the_beginning_of_a_prompt_that_is_too_long_is_cut_off(rig: Rig) -> None:
    """As in vLLM."""
    rig.generator.will(*one_by_one(HELLO))
    whole = await prompt_of(rig, [{"role": "user", "content": "one two " * 4096}])
    body = {"input": "one two " * 4096, "max_output_tokens": 96}
    status, answer, _ = await rig.post(PATH, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer, _ = await rig.post(PATH, body | {"truncation": "auto"})
    assert (status, answer["truncation"]) == (200, "auto")
    assert list(rig.generator.requests[-1].token_ids) == whole[-4000:]


async def test_labels_of_any_form_change_nothing_but_the_answer(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO, "stop"))
    for given, shown in ((None, {}), ({}, {}), ({"a": 1}, {"a": 1}), ("text", "text")):
        status, answer, _ = await rig.post(PATH, {"input": "Hello", "metadata": given})
        assert (status, answer["metadata"]) == (200, shown)


async def test_fields_beyond_openais(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    body = {
        "input": "Hello",
        "logit_bias": {"5": 1.5},
        "structured_outputs": {"regex": "a+"},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "include_reasoning": False,
    }
    status, answer, _ = await rig.post(PATH, body)
    assert status == 200, answer
    sampling = rig.generator.requests[-1].sampling
    assert sampling.logit_bias == ((5, 1.5),)
    assert "a+" in sampling.grammar


async def test_a_conversation(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    items = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}],
        },
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hi", "annotations": []}],
        },
        {"role": "user", "content": "Again"},
    ]
    status, _, _ = await rig.post(PATH, {"instructions": "Be kind.", "input": items})
    assert status == 200
    expected = [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Again"},
    ]
    assert list(rig.generator.requests[0].token_ids) == await prompt_of(rig, expected)


async def test_a_stream(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    found = events(await rig.raw(PATH, {"input": "Hello", "stream": True}))
    assert [each["type"].removeprefix("response.") for each in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    text = rig.tokenizer.decode(HELLO, True)
    assert "".join(each["delta"] for each in found if "delta" in each) == text
    assert found[7]["text"] == found[8]["part"]["text"] == found[9]["item"]["content"][0]["text"] == text
    assert found[0]["response"]["output"] == []
    last = found[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["output"] == [found[9]["item"]]
    assert {each["item_id"] for each in found if "item_id" in each} == {last["output"][0]["id"]}


async def test_log_probabilities_of_the_text(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO, "stop", 3))
    body = {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, answer, _ = await rig.post(PATH, body)
    name = rig.tokenizer.token_text
    assert answer["top_logprobs"] == 2
    [part] = answer["output"][0]["content"]
    # The stop token yields no text.
    assert [each["token"] for each in part["logprobs"]] == [name(token) for token in HELLO[:2]]
    entry = {"token": name(331), "logprob": -0.5, "bytes": list(rig.tokenizer.token_bytes(331))}
    assert {**part["logprobs"][0], "top_logprobs": None} == {**entry, "top_logprobs": None}
    assert part["logprobs"][0]["top_logprobs"] == [
        entry,
        {"token": name(332), "logprob": -1.5, "bytes": list(rig.tokenizer.token_bytes(332))},
    ]
    assert [asked.sampling.logprobs for asked in rig.generator.requests] == [2]

    found = events(await rig.raw(PATH, {**body, "stream": True}))
    deltas = [each for each in found if each["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in delta["logprobs"]] for delta in deltas] == [
        [delta["delta"]] for delta in deltas
    ]
    [done] = [each for each in found if each["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"] == [each for delta in deltas for each in delta["logprobs"]]
    assert found[-1]["response"]["output"][0]["content"] == [part]
    # Without the name in `include`, as at OpenAI, or without alternatives.
    _, answer, _ = await rig.post(PATH, {"input": "Hello", "top_logprobs": 2})
    assert answer["output"][0]["content"][0]["logprobs"] == []
    _, answer, _ = await rig.post(PATH, {**body, "top_logprobs": None})
    assert [each["top_logprobs"] for each in answer["output"][0]["content"][0]["logprobs"]] == [[], []]
    assert [asked.sampling.logprobs for asked in rig.generator.requests[2:]] == [None, 0]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (NodeLost("the node is gone"), "server_error"),
        (InvalidGrammar("the node is gone"), "invalid_prompt"),
    ],
)
async def test_a_stream_that_fails_says_so(rig: Rig, failure: Exception, code: str) -> None:
    rig.generator.will(delta([331], None, 0), failure)
    found = events(await rig.raw(PATH, {"input": "Hello", "stream": True}))
    assert found[-1]["type"] == "response.failed"
    error = {"code": code, "message": "the node is gone"}
    assert (found[-1]["response"]["status"], found[-1]["response"]["error"]) == ("failed", error)


async def test_an_aborted_answer_is_cancelled(rig: Rig) -> None:
    rig.generator.will(delta([331], None, 0), delta([], "abort"))
    _, answer, _ = await rig.post(PATH, {"input": "Hello"})
    assert (answer["status"], answer["output"][0]["status"]) == ("cancelled", "incomplete")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "truncation": "left"}, "truncation"),
        ({"input": "x", "enable_response_messages": True}, "enable_response_messages"),
        ({"input": "x", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"input": "x", "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"input": "x", "include": ["file_search_call.results", "x"]}, "include[1]"),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "x", "top_logprobs": "2"}, "top_logprobs"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 9999}, "max_output_tokens"),
        ({"input": "x " * 5000}, "input"),
        ({"input": "x", "top_p": 2}, "top_p"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
        ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"input": "x", "tool_choice": {"type": "web_search", "name": "f"}}, "tool_choice"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        # Fields of the chat that the request becomes have other names and places.
        ({"instructions": "x", "input": [IMAGE]}, "input[0].content[1].image_url"),
        ({"input": [*CALL, IMAGE]}, "input[3].content[1].image_url"),
        ({"input": [{**CALL[1], "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [CALL[0], CALL[1], {**CALL[1], "arguments": "{"}]}, "input[2].arguments"),
        (
            {"input": "x", "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "f f"}]},
            "tools[1].name",
        ),
        (
            {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": DEEP}]},
            "tools[0].parameters",
        ),
    ],
)
async def test_refusals_name_the_clients_field(rig: Rig, body: dict[str, Any], param: str) -> None:
    rig.generator.will(*one_by_one(HELLO))
    status, answer, _ = await rig.post(PATH, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_the_refusal_of_items_without_content_does_not_ask_for_more_items(rig: Rig) -> None:
    status, answer, _ = await rig.post(PATH, {"input": [{"type": "reasoning", "summary": []}]})
    assert (status, answer["error"]["param"]) == (400, "input")
    assert answer["error"]["message"] == "nothing in input can be read by the model; send a text"


@pytest.mark.parametrize("part", [{"type": "input_image", "file_id": "f"}, {"type": "input_text"}])
async def test_the_refusal_of_a_part_says_which_field_is_missing(rig: Rig, part: dict[str, Any]) -> None:
    status, answer, _ = await rig.post(PATH, {"input": [{"role": "user", "content": [part]}]})
    assert status == 400
    assert answer["error"]["message"] == (
        f"input[0].content[0] has type '{part['type']}'; send input_text and output_text with `text`, refusal with "
        "`refusal`, and input_image with `image_url`"
    )


async def test_large_bodies_are_read_by_text_workers_with_the_same_result(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    raw = json.dumps({"input": [{"role": "user", "content": "Hello"}], "top_k": 3}).encode()
    for padding in (b"", b" " * (1 << 16)):
        assert (await rig.post(PATH, raw + padding))[0] == 200
    first, second = rig.generator.requests
    assert (second.token_ids, second.sampling.top_k) == (first.token_ids, 3)


@pytest.mark.parametrize("padding", [0, 1 << 16])
async def test_integers_that_no_message_can_hold_are_refused(rig: Rig, padding: int) -> None:
    rig.generator.will(*one_by_one(HELLO))
    schema = b'{"type":"object","maximum":' + b"9" * 400 + b"}"
    tools = b'[{"type":"function","name":"f","parameters":' + schema + b"}]"
    raw = b'{"input":"x","tools":' + tools + b',"tool_choice":"none"}' + b" " * padding
    assert (await rig.post(PATH, raw))[0] == 400


async def test_input_tokens_are_counted(rig: Rig) -> None:
    body = {"instructions": "Be brief.", "input": "Hi"}
    status, answer, _ = await rig.post(PATH + "/input_tokens", body)
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = {"input_tokens": len(await prompt_of(rig, told)), "object": "response.input_tokens"}
    assert (status, answer) == (200, expected)
    # more than the context holds
    _, answer, _ = await rig.post(PATH + "/input_tokens", {"input": "x " * 5000})
    assert answer["input_tokens"] > 4096
    status, answer, _ = await rig.post(PATH + "/input_tokens", {"input": []})
    assert (status, answer["error"]["param"]) == (400, "input")
