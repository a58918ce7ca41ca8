"""openai-agents: agents on the responses and the chat API, streams, tools and typed output."""

from __future__ import annotations

from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.clients.features import (
    KEY,
    MODEL,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    V1,
    Features,
    says_product,
    solved,
)

features = Features()
case = features.case
set_tracing_disabled(True)
plain = ModelSettings(temperature=0)
typed = ModelSettings(temperature=0, extra_body={"frequency_penalty": PENALTY})


class Forecast(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def model(api: str) -> OpenAIResponsesModel | OpenAIChatCompletionsModel:
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    return kind(model=MODEL, openai_client=client)


def register(api: str) -> None:
    """Register the features of one API."""

    @case(f"{api}: run")
    async def run() -> None:
        result = await Runner.run(Agent(name="a", model=model(api), model_settings=plain), QUESTION)
        solved(result.final_output)

    @case(f"{api}: stream")
    async def stream() -> None:
        result = Runner.run_streamed(Agent(name="a", model=model(api), model_settings=plain), QUESTION)
        pieces = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        solved("".join(pieces))
        solved(result.final_output)

    @case(f"{api}: tools auto, and their result")
    async def auto() -> None:
        called = []

        @function_tool
        def calculator(expression: str) -> str:
            """Evaluates an arithmetic expression."""
            called.append(expression)
            return RESULT

        agent = Agent(name="a", model=model(api), tools=[calculator], model_settings=plain)
        says_product((await Runner.run(agent, PRODUCT)).final_output)
        assert called == ["12*7"]

    @case(f"{api}: tool called, its result is the answer")
    async def tool() -> None:
        called = []

        @function_tool
        def weather(city: Literal["Paris", "Oslo"]) -> str:
            """Weather of a city."""
            called.append(city)
            return f"rain in {city}"

        agent = Agent(
            name="a",
            model=model(api),
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(
                temperature=0, tool_choice="required", extra_body={"frequency_penalty": PENALTY}
            ),
        )
        result = await Runner.run(agent, QUESTION)
        assert called
        assert result.final_output == f"rain in {called[0]}"

    @case(f"{api}: tool called, then an answer")
    async def conversation() -> None:
        @function_tool
        def weather(city: Literal["Paris", "Oslo"]) -> str:
            """Weather of a city."""
            return f"rain in {city}"

        settings = ModelSettings(
            temperature=0, tool_choice="weather", extra_body={"frequency_penalty": PENALTY, "max_tokens": 400}
        )
        if api == "responses":
            settings.extra_body = {"frequency_penalty": PENALTY}
        agent = Agent(name="a", model=model(api), tools=[weather], model_settings=settings)
        result = await Runner.run(agent, QUESTION)
        kinds = [type(item).__name__ for item in result.new_items]
        assert [each for each in kinds if each != "ReasoningItem"][:2] == [
            "ToolCallItem",
            "ToolCallOutputItem",
        ]

    @case(f"{api}: strict tools and typed output together")
    async def tool_or_answer() -> None:
        """The model may call the tool or answer at once: the form of the answer must leave both possible."""

        @function_tool
        def weather(city: Literal["Paris", "Oslo"]) -> Forecast:
            """Weather of a city."""
            return Forecast(city=city, days=1)

        agent = Agent(
            name="a",
            model=model(api),
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
            output_type=Forecast,
            model_settings=typed,
        )
        assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)

    @case(f"{api}: typed output")
    async def typed_output() -> None:
        agent = Agent(name="a", model=model(api), output_type=Forecast, model_settings=typed)
        assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)


for name in ("responses", "chat"):
    register(name)

if __name__ == "__main__":
    features.run()
