"""langchain: ChatOpenAI and OpenAI, streams, batches, tools, typed output by three methods, and an agent."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.features import KEY, MODEL, PENALTY, PROMPT, QUESTION, V1, Features, is_weather, solved

features = Features()
case = features.case
link: dict[str, Any] = {"model": MODEL, "base_url": V1, "api_key": KEY, "temperature": 0, "max_retries": 0}
chat_model = ChatOpenAI(**link, stream_usage=True)
typed_model = ChatOpenAI(**link, frequency_penalty=PENALTY)


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


@tool
def weather(city: Literal["Paris", "Oslo"], days: int = 1) -> str:
    """Weather of a city."""
    return f"rain in {city}"


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


@case("tools auto")
def tools_auto() -> None:
    assert chat_model.bind_tools([weather]).invoke(QUESTION).content is not None


@case("tools required")
def tools_required() -> None:
    answer = typed_model.bind_tools([forecast], tool_choice="required", parallel_tool_calls=False).invoke(
        QUESTION
    )
    [call] = answer.tool_calls
    is_weather(call["args"])


@case("tools named")
def tools_named() -> None:
    [call] = typed_model.bind_tools([forecast], tool_choice="forecast").invoke(QUESTION).tool_calls
    is_weather(call["args"])


@case("tools streamed")
def tools_streamed() -> None:
    chunks = list(typed_model.bind_tools([forecast], tool_choice="forecast").stream(QUESTION))
    total = chunks[0]
    for each in chunks[1:]:
        total += each
    [call] = total.tool_calls
    is_weather(call["args"])


@case("tool messages")
def tool_messages() -> None:
    asked = HumanMessage(QUESTION)
    call = typed_model.bind_tools([forecast], tool_choice="forecast").invoke([asked])
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
    short = ChatOpenAI(**link, frequency_penalty=PENALTY, max_tokens=200)
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
    made = create_agent(chat_model, tools=[forecast], system_prompt="Solve the problem.")
    assert made.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].content


@case("agent with typed answer")
def typed_agent() -> None:
    made = create_agent(typed_model, tools=[], response_format=Forecast)
    found = made.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert isinstance(found["structured_response"], Forecast)


if __name__ == "__main__":
    features.run()
