"""Unmodified clients of OpenAI and Anthropic against /v1/responses and /v1/messages.

The test of Anthropic's client runs where it is installed: pip install anthropic.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, get_args

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from router.tokens.tokenizer import Tokenizer
from tests.unit.router.apis.test_responses import HELLO
from tests.unit.router.chat.test_chat_tools_http import STYLE, answers
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, THOUGHT, TOOLS
from tests.unit.router.conftest import SERVED, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

FUNCTIONS = [tool["function"] for tool in TOOLS]
USER: Any = {"role": "user", "content": "Hello"}


# Events by their `type`.
KINDS: dict[str, type[BaseModel]] = {
    get_args(each.model_fields["type"].annotation)[0]: each
    for each in get_args(get_args(ResponseStreamEvent)[0])
}


def data_of(stream: bytes) -> list[dict[str, Any]]:
    lines = stream.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.fixture
async def rig(serve: Serve) -> Rig:
    return await serve(served=replace(SERVED, answers=STYLE))


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=rig.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_openai_responses(rig: Rig, client: openai.AsyncOpenAI) -> None:
    rig.generator.will(*one_by_one(HELLO, "stop"))
    text = rig.tokenizer.decode(HELLO[:2], True)
    answer = await client.responses.create(model="tiny-target", input="Hello", instructions="Be brief.")
    assert (answer.output_text, answer.status) == (text, "completed")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    async with client.responses.stream(model="tiny-target", input=[USER]) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert ("".join(deltas), final.output_text) == (text, text)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny-target", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


async def test_openai_responses_with_tools(
    rig: Rig, client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    answers(rig, tokenizer, THOUGHT + OBJECT_CALLS, "stop")
    tools: Any = [{"type": "function", **each} for each in FUNCTIONS]
    async with client.responses.stream(model="tiny-target", input="Hello", tools=tools) as stream:
        done = [event async for event in stream if event.type == "response.function_call_arguments.done"]
        final = await stream.get_final_response()
    assert [event.arguments for event in done] == ['{"city": "Paris", "days": 3}', "{}"]
    assert [item.type for item in final.output] == ["reasoning", "function_call", "function_call"]


@pytest.mark.parametrize("text", [THOUGHT + "It rains." + OBJECT_CALLS, "It", ""])
async def test_answers_have_the_types_of_the_client(rig: Rig, tokenizer: Tokenizer, text: str) -> None:
    """The client itself checks nothing, but programs around it do."""
    rig.generator.will(*one_by_one([*tokenizer.encode(text, False), 2], "stop", 1))
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    chat = {"messages": [USER], "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    response = {
        "input": "Hello",
        "tools": tools,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    ChatCompletion.model_validate((await rig.post("/v1/chat/completions", chat))[1])
    Completion.model_validate((await rig.post("/v1/completions", {"prompt": "Hello", "logprobs": 1}))[1])
    Response.model_validate((await rig.post("/v1/responses", response))[1])
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for event in data_of(await rig.raw("/v1/chat/completions", chat | usage)):
        ChatCompletionChunk.model_validate(event)
    events = data_of(await rig.raw("/v1/responses", response | {"stream": True}))
    for kind in {event["type"] for event in events}:
        # All events of a kind have the same form.
        for event in [each for each in events if each["type"] == kind][:2]:
            KINDS[kind].model_validate(event)


async def test_anthropic(rig: Rig, tokenizer: Tokenizer) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    rig.generator.will(*one_by_one(HELLO, "stop"))
    text = rig.tokenizer.decode(HELLO[:2], True)
    asked: dict[str, Any] = {"model": "tiny-target", "max_tokens": 500, "messages": [USER]}
    async with anthropic.AsyncAnthropic(base_url=rig.url, api_key="none", max_retries=0) as client:
        raw = await client.messages.with_raw_response.create(**asked, system="Be brief.")
        answer = await raw.parse()
        assert (answer.content[0].text, answer.stop_reason, answer.usage.output_tokens) == (
            text,
            "end_turn",
            3,
        )
        assert raw.request_id == answer.id.removeprefix("msg_")
        async with client.messages.stream(**asked) as stream:
            assert stream.request_id
            assert "".join([piece async for piece in stream.text_stream]) == text
            final = await stream.get_final_message()
        assert (final.content[0].text, final.usage.cache_read_input_tokens) == (text, 3)
        count = await client.messages.count_tokens(model="tiny-target", messages=[USER])
        assert count.input_tokens == final.usage.input_tokens + 3
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(**{**asked, "max_tokens": 9_999})
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.messages.create(**{**asked, "model": "other"})
        assert refused.value.request_id == refused.value.body["request_id"]
        answers(rig, tokenizer, THOUGHT + OBJECT_CALLS, "stop")
        rig.generator.scripts = rig.generator.scripts[1:]
        tools = [{"name": each["name"], "input_schema": {"type": "object"}} for each in FUNCTIONS]
        async with client.messages.stream(**asked, tools=tools) as stream:
            final = await stream.get_final_message()
        kinds = [block.type for block in final.content]
        assert (kinds, final.stop_reason) == (["thinking", "tool_use", "tool_use"], "tool_use")
        assert final.content[1].input == {"city": "Paris", "days": 3}
