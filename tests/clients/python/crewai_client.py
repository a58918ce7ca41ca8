"""crewai: its own client on chats and responses, streams, tools, typed output, agents and a crew."""

from __future__ import annotations

import os
from typing import Any, Literal

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel, Field

from tests.clients.features import (
    KEY,
    MESSAGES,
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


class Forecast(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def model(**options: Any) -> LLM:
    return LLM(model=f"openai/{MODEL}", base_url=V1, api_key=KEY, temperature=0, max_retries=0, **options)


def worker(**options: Any) -> Agent:
    return Agent(role="solver", goal="solve problems", backstory="You solve problems.", max_iter=2, **options)


@case("call")
def call() -> None:
    solved(model().call(MESSAGES))


@case("stream")
def stream() -> None:
    solved(model(stream=True).call(MESSAGES))


@case("responses")
def responses() -> None:
    solved(model(api="responses").call(MESSAGES))


@case("typed output")
def typed() -> None:
    found = model(response_format=Forecast, frequency_penalty=PENALTY).call(MESSAGES)
    assert isinstance(found, Forecast)


@case("an agent")
def agent() -> None:
    solved(worker(llm=model()).kickoff(QUESTION).raw)


@case("a crew, its tool and the answer")
def crew() -> None:
    called = []

    @tool("calculator")
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression."""
        called.append(expression)
        return RESULT

    made = worker(llm=model(), tools=[calculator])
    task = Task(description=PRODUCT, expected_output="a number", agent=made)
    says_product(Crew(agents=[made], tasks=[task]).kickoff().raw)
    assert called == ["12*7"]


if __name__ == "__main__":
    features.run()
