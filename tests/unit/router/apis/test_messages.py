"""Anthropic's /v1/messages over HTTP: conversations in, a message or its events out, errors in its form."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from common.errors import DeadlineExceeded, InvalidGrammar, NodeLost
from router.apis.messages_request import read_messages
from tests.fakes.api_keys import bearer
from tests.unit.router.apis.test_responses import DEEP, HELLO, prompt_of
from tests.unit.router.auth.test_gates import key_gate
from tests.unit.router.conftest import Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

PATH = "/v1/messages"
USER = {"role": "user", "content": "Hello"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def events(raw: bytes) -> list[dict[str, Any]]:
    *lines, end = raw.decode().split("\n\n")
    assert end == ""
    found = []
    for line in lines:
        kind, data = line.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


async def test_a_message(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO, "stop"))
    body = {
        "model": "tiny-target",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "top_k": 5,
        "metadata": {"user_id": "u"},
    }
    status, answer, headers = await rig.post(PATH, body)
    assert status == 200, answer
    [asked] = rig.generator.requests
    assert answer == {
        "id": f"msg_{headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "tiny-target",
        "content": [{"type": "text", "text": rig.tokenizer.decode(HELLO[:2], True)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(asked.token_ids) - 3,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert list(asked.token_ids) == await prompt_of(rig, [{"role": "system", "content": "Be brief."}, USER])
    assert (asked.sampling.max_tokens, asked.sampling.top_k) == (9, 5)


async def test_a_stream(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    found = events(await rig.raw(PATH, {"max_tokens": 3, "messages": [USER], "stream": True}))
    assert [each["type"] for each in found] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["cache_read_input_tokens"] == 3
    text = "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta")
    assert text == rig.tokenizer.decode(HELLO, True)
    assert found[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 3


async def test_a_stop_sequence_is_named(rig: Rig) -> None:
    rig.generator.will(delta([331], None, 0), delta([10], None), 60.0)
    body = {"max_tokens": 9, "messages": [USER], "stop_sequences": ["$"]}
    _, answer, _ = await rig.post(PATH, body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "$")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NodeLost("over"), "overloaded_error"),
        (InvalidGrammar("over"), "invalid_request_error"),
        (DeadlineExceeded("over"), "timeout_error"),
    ],
)
async def test_a_stream_that_fails_ends_with_an_error(rig: Rig, error: Exception, kind: str) -> None:
    rig.generator.will(delta([331], None, 0), error)
    found = events(await rig.raw(PATH, {"max_tokens": 9, "messages": [USER], "stream": True}))
    assert found[-1]["type"] == "error"
    assert (found[-1]["error"]["type"], found[-1]["error"]["message"]) == (kind, "over")


def test_reasoning_that_the_client_omits() -> None:
    for display, shown in (("omitted", False), ("summarized", None), (None, None)):
        body = {"max_tokens": 9, "messages": [USER], "thinking": {"type": "adaptive", "display": display}}
        assert read_messages(msgspec.json.encode(body)).chat.include_reasoning is shown


@pytest.mark.parametrize("edits", [None, [], [{"type": "clear_thinking_20251015", "keep": "all"}]])
async def test_context_management_that_removes_nothing_is_taken(rig: Rig, edits: Any) -> None:
    """Coding agents send this field with every request."""
    rig.generator.will(*one_by_one(HELLO))
    managed = {} if edits is None else {"edits": edits}
    status, answer, _ = await rig.post(
        PATH, {"max_tokens": 9, "messages": [USER], "context_management": managed}
    )
    assert status == 200, answer


async def test_context_management_that_removes_thinking_is_refused(rig: Rig) -> None:
    """The refusal says how to keep it."""
    managed = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
    body = {"max_tokens": 9, "messages": [USER], "context_management": managed}
    status, answer, _ = await rig.post(PATH, body)
    assert status == 400
    remedy = 'send {"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}'
    assert remedy in answer["error"]["message"]


async def test_typed_output(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {"max_tokens": 9, "messages": [USER], "cache_salt": "s"}
    output = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    status, answer, _ = await rig.post(PATH, body | {"output_config": output})
    assert status == 200, answer
    await rig.post("/v1/chat/completions", _chat_with(schema))
    typed, chat = (each.sampling.grammar for each in rig.generator.requests)
    assert typed == chat != ""


def _chat_with(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return {"messages": [USER], "response_format": form}


def test_effort_and_strict_tools() -> None:
    """`thinking` says whether the model reasons, `output_config.effort` how much."""
    for thinking, effort, expected in (
        (None, None, None),
        (None, "low", "low"),
        ("adaptive", "low", "low"),
        ("adaptive", None, "medium"),
        ("disabled", "low", "none"),
    ):
        body: dict[str, Any] = {"max_tokens": 9, "messages": [USER], "output_config": {"effort": effort}}
        body["thinking"] = None if thinking is None else {"type": thinking}
        body["tools"] = [{"name": "clock", "input_schema": {}, "strict": True}]
        chat = read_messages(msgspec.json.encode(body)).chat
        assert chat.reasoning_effort == expected
        assert chat.tools is not None
        [tool] = chat.tools
        assert tool.function is not None
        assert tool.function.strict


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER]}, "max_tokens"),
        ({"max_tokens": 9}, "messages"),
        ({"max_tokens": 0, "messages": [USER]}, "max_tokens"),
        ({"max_tokens": 9999, "messages": [USER]}, "max_tokens"),
        ({"max_tokens": 9, "messages": []}, "messages"),
        ({"max_tokens": 9, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 9, "messages": [USER, {"role": "user", "content": []}]}, "messages[1].content"),
        ({"max_tokens": 9, "messages": [USER], "stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 9, "messages": [USER], "mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {
                "max_tokens": 9,
                "messages": [USER],
                "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
            },
            "context_management",
        ),
        ({"max_tokens": 9, "messages": [USER], "tool_choice": {"type": "x"}}, "tool_choice"),
        (
            {"max_tokens": 9, "messages": [USER], "tool_choice": {"type": "tool", "name": "f"}},
            "tool_choice.name",
        ),
        ({"max_tokens": 9, "messages": [USER], "thinking": {"type": "x"}}, "thinking"),
        (
            {"max_tokens": 9, "messages": [USER], "thinking": {"type": "enabled", "display": "none"}},
            "thinking.display",
        ),
        (
            {"max_tokens": 9, "messages": [USER], "thinking": {"type": "enabled", "tokens": 9}},
            "thinking.tokens",
        ),
        ({"max_tokens": 9, "messages": [USER], "output_config": {"effort": "x"}}, "output_config.effort"),
        (
            {"max_tokens": 9, "messages": [USER], "output_config": {"format": {"type": "x"}}},
            "output_config.format",
        ),
        (
            {
                "max_tokens": 9,
                "messages": [USER],
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}},
            },
            "output_config.format.schema",
        ),
        ({"max_tokens": 9, "messages": [USER], "output_format": {"type": "x"}}, "output_format"),
        (
            {"max_tokens": 9, "messages": [USER], "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs.x",
        ),
        (
            {"max_tokens": 9, "messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools[0]",
        ),
        (
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        # Fields of the chat that the request becomes have other names and places.
        (
            {"max_tokens": 9, "system": "x", "messages": [{"role": "user", "content": [TEXT, IMAGE]}]},
            "messages[0].content[1].source",
        ),
        ({"max_tokens": 9, "messages": [USER], "tools": [{"name": "f"}, {"name": "f f"}]}, "tools[1].name"),
        (
            {"max_tokens": 9, "messages": [USER], "tools": [{"name": "f", "input_schema": DEEP}]},
            "tools[0].input_schema",
        ),
    ],
)
async def test_refusals_have_anthropics_form(rig: Rig, body: dict[str, Any], param: str) -> None:
    rig.generator.will(*one_by_one(HELLO))
    status, answer, headers = await rig.post(PATH, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert answer["error"]["param"] == param, answer
    assert answer["request_id"] == headers["x-request-id"] == headers["request-id"]


def test_images_are_given_by_url_or_as_data() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    data = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa=="}}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [by_url, TEXT, data]}]}
    [message] = msgspec.to_builtins(read_messages(msgspec.json.encode(body)).chat.messages)
    given = [part["text"] or part["image_url"]["url"] for part in message["content"]]
    assert given == ["https://x/y.png", "a", "data:image/png;base64,aa=="]


async def test_other_errors_have_anthropics_form(serve: Serve) -> None:
    rig = await serve(gate=key_gate())
    body = {"max_tokens": 9, "messages": [USER]}
    status, answer, headers = await rig.post(PATH, body, {"x-api-key": "wrong"})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")
    assert answer["request_id"] == headers["request-id"]
    status, answer, _ = await rig.post(PATH, body, bearer("secret-ops"))
    assert (status, answer["error"]["type"]) == (403, "permission_error")
    key = {"x-api-key": "secret-a", "anthropic-version": "2023-06-01"}
    status, answer, _ = await rig.post(PATH, {**body, "model": "other"}, key)
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, answer, _ = await rig.post(PATH + "/batches", body, key)
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    rig.generator.will(NodeLost("the node is gone"))
    status, answer, headers = await rig.post(PATH, body, key)
    assert (status, answer["error"]["type"]) == (503, "overloaded_error")
    assert headers["x-should-retry"] == "true"
    rig.generator.will(*one_by_one(HELLO))
    rig.generator.scripts = rig.generator.scripts[1:]
    assert (await rig.post(PATH, body, key))[0] == 200
    assert rig.generator.requests[-1].client == "team-a"


async def test_count_tokens(rig: Rig) -> None:
    body = {"model": "tiny-target", "system": "Be brief.", "messages": [USER]}
    status, answer, _ = await rig.post(PATH + "/count_tokens", body)
    expected = await prompt_of(rig, [{"role": "system", "content": "Be brief."}, USER])
    assert (status, answer) == (200, {"input_tokens": len(expected)})
    # more than the context holds
    _, answer, _ = await rig.post(PATH + "/count_tokens", {"messages": [{**USER, "content": "x " * 5000}]})
    assert answer["input_tokens"] > 4096


async def test_a_last_message_of_the_assistant_is_continued(rig: Rig) -> None:
    rig.generator.will(*one_by_one(HELLO))
    body = {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": "Hi"}]}
    assert (await rig.post(PATH, body))[0] == 200
    await rig.post(
        "/v1/chat/completions", {**body, "continue_final_message": True, "add_generation_prompt": False}
    )
    first, second = rig.generator.requests
    assert first.token_ids == second.token_ids
