"""instructor: typed answers by each of its modes, lists, partial streams."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.features import KEY, MESSAGES, MODEL, PENALTY, STRONG_PENALTY, V1, Features

features = Features()
case = features.case
asked: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "temperature": 0,
    "frequency_penalty": PENALTY,
    "max_retries": 0,
}


class Forecast(BaseModel):
    """A forecast."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)


@case("mode TOOLS")
def tools() -> None:
    assert isinstance(
        client(instructor.Mode.TOOLS).chat.completions.create(response_model=Forecast, **asked), Forecast
    )


@case("mode TOOLS, completion beside it")
def with_completion() -> None:
    found, raw = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(
        response_model=Forecast, **asked
    )
    assert isinstance(found, Forecast)
    assert raw.usage.completion_tokens > 0


@case("mode JSON_SCHEMA")
def json_schema() -> None:
    found = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Forecast, **asked)
    assert isinstance(found, Forecast)


@case("mode JSON: an object of any form")
def json_object() -> None:
    """The mode only asks for JSON, and this model does not follow the schema in its prompt."""

    class Anything(BaseModel):
        pass

    found = client(instructor.Mode.JSON).chat.completions.create(
        response_model=Anything, **asked | {"frequency_penalty": STRONG_PENALTY}, max_tokens=400
    )
    assert isinstance(found, Anything)


@case("partial stream")
def partial() -> None:
    stream = client(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Forecast, **asked)
    *_, last = stream
    assert last.city in ("Paris", "Oslo")
    assert last.days in range(1, 8)


@case("parallel list")
def iterable() -> None:
    class Forecasts(BaseModel):
        forecasts: list[Forecast] = Field(min_length=2, max_length=3)

    found = client(instructor.Mode.TOOLS).chat.completions.create(response_model=Forecasts, **asked)
    assert 2 <= len(found.forecasts) <= 3


@case("asynchronous")
async def asynchronous() -> None:
    many = instructor.from_openai(
        AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS
    )
    assert isinstance(await many.chat.completions.create(response_model=Forecast, **asked), Forecast)


@case("mode RESPONSES_TOOLS")
def responses() -> None:
    made = client(instructor.Mode.RESPONSES_TOOLS)
    body = {"frequency_penalty": PENALTY}
    found = made.responses.create(
        model=MODEL, input=MESSAGES, response_model=Forecast, temperature=0, max_retries=0, extra_body=body
    )
    assert isinstance(found, Forecast)


if __name__ == "__main__":
    features.run()
