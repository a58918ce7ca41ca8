"""haystack: chats and responses, streams, tools, typed output, agents and a pipeline."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel, Field

from tests.clients.features import (
    ABOUT,
    EXPRESSION,
    KEY,
    MODEL,
    NAMED,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    V1,
    Features,
    is_weather,
    says_product,
    solved,
)

features = Features()
case = features.case
GENERATORS: dict[str, Any] = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}


class Forecast(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def generator(api: str, **options: Any) -> Any:
    callback = options.pop("streaming_callback", None)
    return GENERATORS[api](
        api_key=Secret.from_token(KEY),
        model=MODEL,
        api_base_url=V1,
        max_retries=0,
        streaming_callback=callback,
        generation_kwargs={"temperature": 0, **options},
    )


def register(api: str) -> None:
    """Register the features of one API."""

    @case(f"{api}: run")
    def run() -> None:
        [reply] = generator(api).run([ChatMessage.from_user(QUESTION)])["replies"]
        solved(reply.text)

    @case(f"{api}: stream")
    def stream() -> None:
        chunks = list[StreamingChunk]()
        [reply] = generator(api, streaming_callback=chunks.append).run([ChatMessage.from_user(QUESTION)])[
            "replies"
        ]
        solved(reply.text)
        assert len(chunks) > 3

    @case(f"{api}: an agent, its tool and the answer")
    def agent() -> None:
        called = []

        def calculator(expression: str) -> str:
            called.append(expression)
            return RESULT

        tool = Tool(name="calculator", description=ABOUT, parameters=EXPRESSION, function=calculator)
        made = Agent(chat_generator=generator(api), tools=[tool])
        says_product(made.run(messages=[ChatMessage.from_user(PRODUCT)])["last_message"].text)
        assert called == ["12*7"]


for name in GENERATORS:
    register(name)


@case("chat: a forced call")
def forced() -> None:
    tool = Tool(name="weather", description="Weather of a city", parameters=PARAMETERS, function=print)
    made = generator("chat", tool_choice=NAMED, frequency_penalty=PENALTY)
    [reply] = made.run([ChatMessage.from_user(QUESTION)], tools=[tool])["replies"]
    is_weather(reply.tool_calls[0].arguments)


@case("chat: typed output")
def typed() -> None:
    made = generator("chat", response_format=Forecast, frequency_penalty=PENALTY)
    [reply] = made.run([ChatMessage.from_user(QUESTION)])["replies"]
    is_weather(json.loads(reply.text))


@case("chat: a pipeline")
def pipeline() -> None:
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("{{question}}")]))
    made.add_component("model", generator("chat"))
    made.connect("prompt.prompt", "model.messages")
    solved(made.run({"prompt": {"question": QUESTION}})["model"]["replies"][0].text)


if __name__ == "__main__":
    features.run()
