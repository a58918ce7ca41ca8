"""litellm: its `hosted_vllm` and `openai` providers, text completions, tools, typed output and the Anthropic bridge."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm

from tests.clients.features import (
    CALCULATOR,
    KEY,
    MESSAGES,
    MODEL,
    NAMED,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    PROMPT,
    QUESTION,
    RESULT,
    TOOLS,
    V1,
    Features,
    is_call,
    is_product,
    is_weather,
    says_product,
    solved,
)

features = Features()
case = features.case
asked: dict[str, Any] = {
    "model": f"hosted_vllm/{MODEL}",
    "api_base": V1,
    "api_key": KEY,
    "messages": MESSAGES,
    "temperature": 0,
    "num_retries": 0,
}
typed = {**asked, "frequency_penalty": PENALTY}


@case("chat")
def chat() -> None:
    answer = litellm.completion(**asked)
    solved(answer.choices[0].message.content)
    assert answer.usage.total_tokens > 0


@case("chat stream")
def chat_stream() -> None:
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    solved("".join(each.choices[0].delta.content or "" for each in chunks if each.choices))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    solved(rebuilt.choices[0].message.content)
    assert rebuilt.usage.completion_tokens > 0


@case("asynchronous, 20 at once")
async def asynchronous() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(20)))
    for answer in answers:
        solved(answer.choices[0].message.content)


@case("openai provider")
def openai_provider() -> None:
    solved(litellm.completion(**asked | {"model": f"openai/{MODEL}"}).choices[0].message.content)


@case("tools auto, and their result")
def tools_auto() -> None:
    product = {**asked, "messages": [{"role": "user", "content": PRODUCT}], "tools": [CALCULATOR]}
    choice = litellm.completion(**product).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    is_product(call.function.name, call.function.arguments)
    product["messages"] = [
        {"role": "user", "content": PRODUCT},
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    says_product(litellm.completion(**product).choices[0].message.content)


@case("tools required")
def tools_required() -> None:
    answer = litellm.completion(**asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    # The provider leaves `additionalProperties` out.
    is_call(call.function.name, call.function.arguments, closed=False)
    assert answer.choices[0].finish_reason == "tool_calls"


@case("tools streamed")
def tools_streamed() -> None:
    chunks = list(litellm.completion(**asked, tools=TOOLS, tool_choice=NAMED, stream=True))
    [call] = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message.tool_calls
    is_weather(call.function.arguments, closed=False)


@case("tool messages")
def tool_messages() -> None:
    first = litellm.completion(**asked, tools=TOOLS, tool_choice=NAMED).choices[0].message
    back = [*MESSAGES, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    assert litellm.completion(**asked | {"messages": back}, tools=TOOLS).choices


@case("typed output")
def typed_output() -> None:
    schema = {"name": "forecast", "schema": PARAMETERS, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    is_weather(litellm.completion(**typed, response_format=form).choices[0].message.content)


@case("log-probabilities")
def logprobs() -> None:
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    assert all(len(each["top_logprobs"]) == 2 for each in answer.choices[0].logprobs["content"])


@case("text completion")
def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=V1, api_key=KEY, prompt=PROMPT, max_tokens=8
    )
    assert answer.choices[0].text


@case("responses")
def responses() -> None:
    answer = litellm.responses(
        model=f"openai/{MODEL}", api_base=V1, api_key=KEY, input=QUESTION, temperature=0
    )
    [said] = [each for each in answer.output if each.type == "message"]
    solved(said.content[0].text)


@case("errors")
def errors() -> None:
    for wrong, kind in (
        ({"model": "hosted_vllm/other"}, litellm.NotFoundError),
        ({"top_p": 9}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(**asked | wrong)
        except kind:
            continue
        raise AssertionError(f"{wrong} is accepted")


if __name__ == "__main__":
    features.run()
