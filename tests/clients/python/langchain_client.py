"""langchain: ChatOpenAI and OpenAI, streams, batches, tools, typed output by three methods, and an agent."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.features import (
    KEY,
    MODEL,
    PENALTY,
    PRODUCT,
    PROMPT,
    QUESTION,
    RESULT,
    STRONG_PENALTY,
    V1,
    Features,
    is_product,
    is_weather,
    says_product,
    solved,
)

features = Features()
case = features.case
link: dict[str, Any] = {"model": MODEL, "base_url": V1, "api_key": KEY, "temperature": 0, "max_retries": 0}
chat_model = ChatOpenAI(**link, stream_usage=True)
typed_model = ChatOpenAI(**link, frequency_penalty=PENALTY)


class Forecast(BaseModel, extra="forbid"):
    """A forecast."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    assert expression == "12*7", expression
    return RESULT


@tool(args_schema=Forecast)
def forecast(city: str, days: int) -> str:
    """Forecast of a city."""
    return f"rain in {city} for {days} days"


@case("chat")
def chat() -> None:
    answer = chat_model.invoke(QUESTION)
    solved(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0


@case("chat stream")
def chat_stream() -> None:
    chunks = list(chat_model.stream(QUESTION))
    solved("".join(each.content for each in chunks))
    total = chunks[0]
    for each in chunks[1:]:
        total += each
    assert total.usage_metadata["output_tokens"] > 0


@case("asynchronous stream")
async def asynchronous() -> None:
    solved("".join([each.content async for each in chat_model.astream(QUESTION)]))


@case("batch of 20")
def batch() -> None:
    for answer in chat_model.batch([QUESTION] * 20):
        solved(answer.content)


@case("chain with a prompt template")
def chain() -> None:
    solved(
        (ChatPromptTemplate.from_messages([("human", "{q}")]) | chat_model).invoke({"q": QUESTION}).content
    )


@case("tools auto, and their result")
def tools_auto() -> None:
    model, asked = chat_model.bind_tools([calculator]), HumanMessage(PRODUCT)
    answer = model.invoke([asked])
    [call] = answer.tool_calls
    is_product(call["name"], call["args"])
    says_product(model.invoke([asked, answer, calculator.invoke(call)]).content)


@case("tools required")
def tools_required() -> None:
    answer = chat_model.bind_tools(
        [forecast], tool_choice="required", parallel_tool_calls=False, strict=True
    ).invoke(QUESTION)
    [call] = answer.tool_calls
    is_weather(call["args"])


@case("tools named")
def tools_named() -> None:
    [call] = (
        chat_model.bind_tools([forecast], tool_choice="forecast", strict=True).invoke(QUESTION).tool_calls
    )
    is_weather(call["args"])


@case("tools streamed")
def tools_streamed() -> None:
    chunks = list(chat_model.bind_tools([forecast], tool_choice="forecast", strict=True).stream(QUESTION))
    total = chunks[0]
    for each in chunks[1:]:
        total += each
    [call] = total.tool_calls
    is_weather(call["args"])


@case("tool messages")
def tool_messages() -> None:
    asked = HumanMessage(QUESTION)
    call = chat_model.bind_tools([forecast], tool_choice="forecast", strict=True).invoke([asked])
    assert isinstance(call, AIMessage)
    result: ToolMessage = forecast.invoke(call.tool_calls[0])
    assert chat_model.bind_tools([forecast]).invoke([asked, call, result]).content is not None


@case("typed output: json_schema")
def typed_schema() -> None:
    found = typed_model.with_structured_output(Forecast, method="json_schema").invoke(QUESTION)
    assert isinstance(found, Forecast)


@case("typed output: function_calling")
def typed_call() -> None:
    found = typed_model.with_structured_output(Forecast, method="function_calling").invoke(QUESTION)
    assert isinstance(found, Forecast)


@case("typed output: json_mode")
def typed_json() -> None:
    short = ChatOpenAI(**link, frequency_penalty=STRONG_PENALTY, max_tokens=400)
    found = short.with_structured_output(Forecast, method="json_mode", include_raw=True).invoke(
        QUESTION + " Answer in JSON."
    )
    assert found["raw"].content.startswith("{")


@case("log-probabilities")
def logprobs() -> None:
    answer = chat_model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"]


@case("text completion")
def completion() -> None:
    model = OpenAI(**link, max_tokens=8)
    text = model.invoke(PROMPT)
    assert text
    assert "".join(model.stream(PROMPT)) == text


@case("responses")
def responses() -> None:
    model = ChatOpenAI(**link, use_responses_api=True)
    solved(model.invoke(QUESTION).text)
    solved("".join(each.text for each in model.stream(QUESTION)))


@case("agent")
def agent() -> None:
    """The agent calls the tool by itself, and ends with what the tool returned."""
    made = create_agent(chat_model, tools=[calculator])
    said = made.invoke({"messages": [{"role": "user", "content": PRODUCT}]})["messages"]
    assert [each.type for each in said] == ["human", "ai", "tool", "ai"]
    says_product(said[-1].content)


@case("agent with typed answer")
def typed_agent() -> None:
    made = create_agent(typed_model, tools=[], response_format=Forecast)
    found = made.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert isinstance(found["structured_response"], Forecast)


if __name__ == "__main__":
    features.run()
