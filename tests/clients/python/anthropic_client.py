"""anthropic: messages, streams, tools, thinking blocks, token counts and errors on /v1/messages."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic

from tests.clients.features import (
    ABOUT,
    COMPACT,
    EXPRESSION,
    KEY,
    MESSAGES,
    MODEL,
    PRODUCT,
    QUESTION,
    RESULT,
    URL,
    Features,
    is_product,
    is_weather,
    says_product,
    solved,
)

features = Features()
case = features.case
client: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
# The SDK has no temperature any more, and without one the model draws at temperature 1.
greedy = {"extra_body": {"temperature": 0}}
asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 400, **greedy}
tool = {"name": "weather", "description": "Weather of a city", "input_schema": COMPACT}
forced = {
    **asked,
    "tools": [tool],
    "tool_choice": {"type": "tool", "name": "weather"},
}


@case("message")
def message() -> None:
    answer = client.messages.create(**asked)
    solved(answer.content[-1].text)
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0


@case("system, blocks and stop sequences")
def blocks() -> None:
    answer = client.messages.create(
        **asked | {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]},
        system="Solve the problem.",
        stop_sequences=["####"],
    )
    assert "####" not in answer.content[-1].text
    assert answer.stop_reason in ("stop_sequence", "end_turn")


@case("events of a stream")
def events() -> None:
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


@case("stream helper")
def stream_helper() -> None:
    with client.messages.stream(**asked) as stream:
        solved("".join(stream.text_stream))
        solved(stream.get_final_message().content[-1].text)


@case("asynchronous, 20 at once")
async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as many:
        for answer in await asyncio.gather(*(many.messages.create(**asked) for _ in range(20))):
            solved(answer.content[-1].text)


@case("tools auto, and their result")
def tools_auto() -> None:
    product: dict[str, Any] = {"model": MODEL, "max_tokens": 400, **greedy}
    product["tools"] = [{"name": "calculator", "description": ABOUT, "input_schema": EXPRESSION}]
    question: list[Any] = [{"role": "user", "content": PRODUCT}]
    first = client.messages.create(**product, messages=question)
    assert first.stop_reason == "tool_use"
    assert [each.type for each in first.content] == ["thinking", "tool_use"]
    block = first.content[1]
    is_product(block.name, block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
    back = [
        *question,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**product, messages=back)
    assert answer.stop_reason == "end_turn"
    says_product(answer.content[-1].text)


@case("typed output")
def typed_output() -> None:
    form = {"type": "json_schema", "schema": COMPACT}
    answer = client.messages.create(**asked, output_config={"format": form})
    is_weather(answer.content[-1].text)


@case("tools forced, and their result")
def tools_forced() -> None:
    answer = client.messages.create(**forced)
    [block] = [each for each in answer.content if each.type == "tool_use"]
    is_weather(block.input)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    back = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**asked | {"messages": back}, tools=[tool]).stop_reason == "end_turn"


@case("tools streamed")
def tools_streamed() -> None:
    with client.messages.stream(**forced) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        [block] = [each for each in stream.get_final_message().content if each.type == "tool_use"]
    is_weather(block.input)
    is_weather(pieces)


@case("token count")
def token_count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    usage = client.messages.create(**asked).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@case("models")
def models() -> None:
    assert [each.id for each in client.models.list()] == [MODEL]


@case("errors")
def errors() -> None:
    for wrong, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**asked | wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} is accepted")


if __name__ == "__main__":
    features.run()
