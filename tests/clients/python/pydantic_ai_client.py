"""pydantic-ai: agents on the chat and the responses API, streams, tools, and typed output by each mode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.features import KEY, MODEL, PENALTY, QUESTION, V1, Features, solved

features = Features()
case = features.case
provider = OpenAIProvider(base_url=V1, api_key=KEY)
chat_model = OpenAIChatModel(MODEL, provider=provider)
plain = ModelSettings(temperature=0)
typed = ModelSettings(temperature=0, frequency_penalty=PENALTY)


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


@case("run")
def run() -> None:
    result = Agent(chat_model, model_settings=plain).run_sync(QUESTION)
    solved(result.output)
    assert result.usage.output_tokens > 0


@case("stream")
async def stream() -> None:
    async with Agent(chat_model, model_settings=plain).run_stream(QUESTION) as result:
        pieces = [each async for each in result.stream_text(delta=True, debounce_by=None)]
    solved("".join(pieces))
    assert len(pieces) > 3


@case("instructions and a history")
def history() -> None:
    agent = Agent(chat_model, instructions="Solve the problem.", model_settings=plain)
    first = agent.run_sync(QUESTION)
    assert agent.run_sync(QUESTION, message_history=first.all_messages()).output


@case("tools auto")
def tools_auto() -> None:
    agent = Agent(chat_model, model_settings=plain)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"rain in {city}"

    assert agent.run_sync(QUESTION).output


async def _typed(output: Any) -> None:
    agent = Agent(chat_model, output_type=output, model_settings=typed, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Forecast)


@case("typed output: tool")
async def tool_output() -> None:
    await _typed(ToolOutput(Forecast))


@case("typed output: json_schema")
async def native_output() -> None:
    await _typed(NativeOutput(Forecast))


@case("typed output: prompted")
async def prompted_output() -> None:
    """Only asks for a JSON object; the model does not follow the schema, so the request counts and not the type."""

    class Anything(BaseModel):
        pass

    settings = ModelSettings(**typed, max_tokens=400)
    agent = Agent(chat_model, output_type=PromptedOutput(Anything), model_settings=settings, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Anything)


@case("typed output streamed")
async def typed_stream() -> None:
    agent = Agent(chat_model, output_type=Forecast, model_settings=typed, retries=0)
    async with agent.run_stream(QUESTION) as result:
        *_, last = [each async for each in result.stream_output(debounce_by=None)]
    assert isinstance(last, Forecast)


@case("responses")
def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=provider)
    solved(Agent(model, model_settings=plain).run_sync(QUESTION).output)


@case("responses: typed output")
def responses_typed() -> None:
    model = OpenAIResponsesModel(MODEL, provider=provider)
    settings = ModelSettings(temperature=0, extra_body={"frequency_penalty": PENALTY})
    agent = Agent(model, output_type=ToolOutput(Forecast), model_settings=settings, retries=0)
    assert isinstance(agent.run_sync(QUESTION).output, Forecast)


if __name__ == "__main__":
    features.run()
