"""pydantic-ai: agents on the chat and the responses API, streams, tools, and typed output by each mode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.features import (
    KEY,
    MODEL,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    STRONG_PENALTY,
    V1,
    Features,
    says_product,
    solved,
)

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


def _counts(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """Check that an agent calls its tool by itself and ends with what the tool returned."""
    agent, called = Agent(model, model_settings=plain), list[str]()

    @agent.tool_plain
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        called.append(expression)
        return RESULT

    says_product(agent.run_sync(PRODUCT).output)
    assert called == ["12*7"]


@case("tools auto, and their result")
def tools_auto() -> None:
    _counts(chat_model)


@case("responses: tools auto, and their result")
def responses_auto() -> None:
    _counts(OpenAIResponsesModel(MODEL, provider=provider))


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

    settings = ModelSettings(temperature=0, frequency_penalty=STRONG_PENALTY, max_tokens=400)
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
