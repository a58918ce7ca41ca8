"""llama-index: OpenAILike as chat and completion model, streams, tools, typed output and an agent."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from tests.clients.features import (
    ABOUT,
    KEY,
    MODEL,
    PENALTY,
    PRODUCT,
    PROMPT,
    QUESTION,
    RESULT,
    V1,
    Features,
    is_product,
    is_weather,
    says_product,
    solved,
)

features = Features()
case = features.case
link: dict[str, Any] = {
    "model": MODEL,
    "api_base": V1,
    "api_key": KEY,
    "context_window": 16_384,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "temperature": 0,
    "max_retries": 0,
}
chat_model = OpenAILike(**link)
typed_model = OpenAILike(**link, additional_kwargs={"frequency_penalty": PENALTY})
asked = [ChatMessage(role="user", content=QUESTION)]


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def weather(city: Literal["Paris", "Oslo"], days: int) -> str:
    """Weather of a city."""
    return f"rain in {city} for {days} days"


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression."""
    assert expression == "12*7", expression
    return RESULT


tool = FunctionTool.from_defaults(weather, fn_schema=Forecast)
counting = FunctionTool.from_defaults(calculator, description=ABOUT)


@case("chat")
def chat() -> None:
    solved(chat_model.chat(asked).message.content)


@case("chat stream")
def chat_stream() -> None:
    solved("".join(each.delta or "" for each in chat_model.stream_chat(asked)))


@case("asynchronous stream")
async def asynchronous() -> None:
    solved("".join([each.delta or "" async for each in await chat_model.astream_chat(asked)]))


@case("completion")
def completion() -> None:
    model = OpenAILike(**link | {"is_chat_model": False, "max_tokens": 8})
    text = model.complete(PROMPT).text
    assert text
    assert "".join(each.delta for each in model.stream_complete(PROMPT)) == text


@case("tools auto, and their result")
def tools_auto() -> None:
    answer = chat_model.chat_with_tools([counting], user_msg=PRODUCT)
    [call] = chat_model.get_tool_calls_from_response(answer)
    is_product(call.tool_name, call.tool_kwargs)
    result = ChatMessage(role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id})
    history = [ChatMessage(role="user", content=PRODUCT), answer.message, result]
    says_product(chat_model.chat_with_tools([counting], chat_history=history).message.content)


@case("tools required")
def tools_required() -> None:
    answer = chat_model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call] = chat_model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    is_weather(call.tool_kwargs)


@case("tools streamed")
def tools_streamed() -> None:
    *_, last = chat_model.stream_chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    [call] = chat_model.get_tool_calls_from_response(last)
    is_weather(call.tool_kwargs)


@case("typed output: calls")
def typed_calls() -> None:
    assert isinstance(typed_model.structured_predict(Forecast, PromptTemplate("{q}"), q=QUESTION), Forecast)


@case("typed output: json_schema")
def typed_schema() -> None:
    model = OpenAILike(
        **link,
        should_use_structured_outputs=True,
        additional_kwargs={"frequency_penalty": PENALTY},
    )
    assert isinstance(model.structured_predict(Forecast, PromptTemplate("{q}"), q=QUESTION), Forecast)


@case("agent")
async def agent() -> None:
    """The agent calls the tool by itself, and ends with what the tool returned."""
    made = FunctionAgent(tools=[counting], llm=chat_model)
    answer = await made.run(PRODUCT)
    assert [each.tool_name for each in answer.tool_calls] == ["calculator"]
    says_product(str(answer))


if __name__ == "__main__":
    features.run()
