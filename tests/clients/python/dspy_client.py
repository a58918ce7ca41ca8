"""dspy: predictions with its chat and JSON adapters, chains of thought, typed signatures, streams and agents."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import litellm
from pydantic import BaseModel, Field

from tests.clients.features import (
    CALCULATOR,
    KEY,
    MODEL,
    PENALTY,
    PRODUCT,
    QUESTION,
    V1,
    Features,
    is_product,
    solved,
)

features = Features()
case = features.case
link: dict[str, Any] = {"api_base": V1, "api_key": KEY, "cache": False, "num_retries": 0}
plain = dspy.LM(f"openai/{MODEL}", **link, temperature=0, max_tokens=300)
# dspy asks for a schema only if its catalog of models knows that the model takes one.
ABILITIES = {"supports_response_schema": True, "supports_function_calling": True, "mode": "chat"}
litellm.register_model(
    {name: {"litellm_provider": "openai", **ABILITIES} for name in (MODEL, f"openai/{MODEL}")}
)
typed = dspy.LM(
    f"openai/{MODEL}",
    **link,
    temperature=0,
    max_tokens=600,
    frequency_penalty=PENALTY,
    engine="litellm",
)


class Forecast(BaseModel):
    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


class Weather(dspy.Signature):
    """Write a forecast."""

    question: str = dspy.InputField()
    forecast: Forecast = dspy.OutputField()


@case("model called directly")
def direct() -> None:
    [text] = plain(messages=[{"role": "user", "content": QUESTION}])
    solved(text if isinstance(text, str) else text["text"])


@case("asynchronous call")
async def asynchronous() -> None:
    [text] = await plain.acall(messages=[{"role": "user", "content": QUESTION}])
    solved(text if isinstance(text, str) else text["text"])


@case("several answers")
def several() -> None:
    unsure = [{"role": "user", "content": "Write about green trains"}]
    assert len(plain(messages=unsure, n=3, temperature=1.5, max_tokens=16)) == 3


@case("Predict with the JSON adapter: json_schema")
def json_adapter() -> None:
    with dspy.context(lm=typed, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Weather)(question=QUESTION).forecast, Forecast)


@case("Predict one of several values")
def one_of() -> None:
    class Reasoned(dspy.Signature):
        """Choose a city."""

        question: str = dspy.InputField()
        city: Literal["Paris", "Oslo"] = dspy.OutputField()

    with dspy.context(lm=typed, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Reasoned)(question=QUESTION)
    assert found.city in ("Paris", "Oslo")


@case("tools auto")
def tools_auto() -> None:
    [answer] = plain(messages=[{"role": "user", "content": PRODUCT}], tools=[CALCULATOR])
    [call] = answer["tool_calls"]
    is_product(call.function.name, call.function.arguments)


@case("responses")
def responses() -> None:
    lm = dspy.LM(f"openai/{MODEL}", **link, temperature=0, model_type="responses")
    [answer] = lm(messages=[{"role": "user", "content": QUESTION}])
    solved(answer if isinstance(answer, str) else answer["text"])


@case("text completion")
def text_completion() -> None:
    lm = dspy.LM(f"text-completion-openai/{MODEL}", **link, max_tokens=8, model_type="text")
    assert lm(prompt=QUESTION[: len(QUESTION) // 2])


if __name__ == "__main__":
    features.run()
