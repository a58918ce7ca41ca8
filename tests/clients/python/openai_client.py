"""openai for Python: chats, completions, responses, tools, typed output, helpers, and 50 streams at once."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.features import (
    CALCULATOR,
    CLOCK,
    KEY,
    MESSAGES,
    MODEL,
    NAMED,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    TOOLS,
    V1,
    WEATHER,
    Features,
    is_call,
    is_product,
    is_weather,
    says_product,
    solved,
)

STREAMS = 50
client: Any = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
features = Features()
case = features.case
asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
typed: dict[str, Any] = {**asked, "frequency_penalty": PENALTY}
response: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0}
penalty = {"frequency_penalty": PENALTY}


class Forecast(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


@case("models")
def models() -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@case("chat")
def chat() -> None:
    answer = client.chat.completions.create(**asked)
    solved(answer.choices[0].message.content)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@case("chat stream")
def chat_stream() -> None:
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    solved("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))
    assert chunks[-1].usage.completion_tokens > 0
    assert len(chunks) > 5


@case("stream helper")
def stream_helper() -> None:
    with client.chat.completions.stream(**asked) as events:
        kinds = {event.type for event in events}
        solved(events.get_final_completion().choices[0].message.content)
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds


@case("logprobs")
def logprobs() -> None:
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in entries)


@case("n choices")
def choices() -> None:
    unsure = [{"role": "user", "content": "Write about green trains"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=unsure, temperature=2, seed=3, n=4, max_tokens=48, reasoning_effort="none"
    )
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert len({each.message.content for each in answer.choices}) > 1


@case("seed")
def seed() -> None:
    texts = [
        client.chat.completions.create(**asked | {"temperature": 1}, seed=seed).choices[0].message.content
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1]


@case("tools auto, and their result")
def tools_auto() -> None:
    """The model chooses to call, and its answer says what the tool returned."""
    product: dict[str, Any] = {**asked, "tools": [CALCULATOR]}
    product["messages"] = question = [{"role": "user", "content": PRODUCT}]
    choice = client.chat.completions.create(**product).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    is_product(call.function.name, call.function.arguments)
    assert choice.message.reasoning_content
    product["messages"] = [
        *question,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    answer = client.chat.completions.create(**product).choices[0]
    assert answer.finish_reason == "stop"
    says_product(answer.message.content)


@case("tools auto, streamed")
def tools_auto_streamed() -> None:
    product: dict[str, Any] = {**asked, "messages": [{"role": "user", "content": PRODUCT}]}
    with client.chat.completions.stream(**product, tools=[CALCULATOR]) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    [call] = final.message.tool_calls
    is_product(call.function.name, call.function.arguments)
    assert [each.arguments for each in done] == [call.function.arguments]


@case("responses tools auto, and their result")
def responses_auto() -> None:
    tools = [{"type": "function", **CALCULATOR["function"]}]
    asked_product: dict[str, Any] = {"model": MODEL, "temperature": 0, "tools": tools}
    question: list[Any] = [{"role": "user", "content": PRODUCT}]
    first = client.responses.create(**asked_product, input=question)
    [call] = [each for each in first.output if each.type == "function_call"]
    is_product(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    says_product(
        client.responses.create(**asked_product, input=[*question, *first.output, result]).output_text
    )


@case("tools none")
def tools_none() -> None:
    answer = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    solved(answer.choices[0].message.content)


@case("tools required")
def tools_required() -> None:
    answer = client.chat.completions.create(
        **typed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    [call] = answer.choices[0].message.tool_calls
    is_call(call.function.name, call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"


@case("tools named")
def tools_named() -> None:
    answer = client.chat.completions.create(**typed, tools=TOOLS, tool_choice=NAMED)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    is_weather(call.function.arguments)


@case("tools streamed")
def tools_streamed() -> None:
    with client.chat.completions.stream(**typed, tools=TOOLS, tool_choice=NAMED) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        [call] = events.get_final_completion().choices[0].message.tool_calls
    assert [each.name for each in done] == ["weather"]
    is_weather(call.function.arguments)


@case("tool messages")
def tool_messages() -> None:
    first = client.chat.completions.create(**typed, tools=TOOLS, tool_choice=NAMED).choices[0].message
    back = [*MESSAGES, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    assert client.chat.completions.create(**typed | {"messages": back}, tools=TOOLS).choices


@case("typed output")
def typed_output() -> None:
    answer = client.chat.completions.parse(**typed, response_format=Forecast)
    assert isinstance(answer.choices[0].message.parsed, Forecast)


@case("typed tools")
def typed_tools() -> None:
    tool = openai.pydantic_function_tool(Forecast)
    answer = client.chat.completions.parse(**typed, tools=[tool], tool_choice="required")
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Forecast)


@case("json mode")
def json_mode() -> None:
    schema = {"name": "forecast", "schema": PARAMETERS, "strict": True}
    answer = client.chat.completions.create(
        **typed, response_format={"type": "json_schema", "json_schema": schema}
    )
    is_weather(answer.choices[0].message.content)


@case("completions")
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=8, temperature=0, echo=True)
    assert answer.choices[0].text.startswith(QUESTION)
    streamed = client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=8, temperature=0, stream=True
    )
    assert QUESTION + "".join(each.choices[0].text for each in streamed) == answer.choices[0].text


@case("responses")
def responses() -> None:
    answer = client.responses.create(**response)
    solved(answer.output_text)
    assert answer.status == "completed"


@case("responses stream")
def responses_stream() -> None:
    with client.responses.stream(**response) as events:
        pieces = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        solved(events.get_final_response().output_text)
    solved(pieces)


@case("responses tools")
def responses_tools() -> None:
    tools = [{"type": "function", **each["function"], "strict": True} for each in (WEATHER, CLOCK)]
    answer = client.responses.create(
        **response, tools=tools, tool_choice={"type": "function", "name": "weather"}, extra_body=penalty
    )
    [call] = [each for each in answer.output if each.type == "function_call"]
    is_weather(call.arguments)
    back: list[Any] = [{"role": "user", "content": QUESTION}, *answer.output]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    assert client.responses.create(model=MODEL, input=back, tools=tools, max_output_tokens=20).output


@case("responses typed output")
def responses_typed() -> None:
    answer = client.responses.parse(**response, text_format=Forecast, extra_body=penalty)
    assert isinstance(answer.output_parsed, Forecast)


@case("errors")
def errors() -> None:
    for wrong, kind in (
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**asked | wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} is accepted")


@case(f"{STREAMS} parallel streams equal to sequential")
async def parallel() -> None:
    async with AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as many:

        async def one(number: int) -> str:
            question = QUESTION.replace(" ", f" {number} ", 1)
            stream = await many.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": question}],
                stream=True,
                max_tokens=24,
                temperature=1 if number % 2 else 0,
                seed=number,
            )
            deltas = [chunk.choices[0].delta async for chunk in stream]
            return "".join((getattr(each, "reasoning_content", "") or each.content or "") for each in deltas)

        sequential = [await one(number) for number in range(STREAMS)]
        together = await asyncio.gather(*(one(number) for number in range(STREAMS)))
    different = [number for number in range(STREAMS) if sequential[number] != together[number]]
    assert not different, f"streams {different} differ"
    assert all(len(each) > 20 for each in together), "the streams have too little text to tell"


if __name__ == "__main__":
    features.run()
