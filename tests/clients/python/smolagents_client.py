"""smolagents: OpenAIModel alone and streamed, with tools and typed output, and the tool-calling agent."""

from __future__ import annotations

import json
from typing import Any

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tests.clients.features import (
    KEY,
    MESSAGES,
    MODEL,
    PARAMETERS,
    PENALTY,
    PRODUCT,
    QUESTION,
    RESULT,
    V1,
    Features,
    is_product,
    is_weather,
    solved,
)

features = Features()
case = features.case
link: dict[str, Any] = {
    "model_id": MODEL,
    "api_base": V1,
    "api_key": KEY,
    "client_kwargs": {"max_retries": 0},
    "temperature": 0,
}
plain = OpenAIModel(**link, max_tokens=200)
typed = OpenAIModel(**link, max_tokens=600, frequency_penalty=PENALTY)


@tool
def count(days: int) -> str:
    """Counts days.

    Args:
        days: how many
    """
    return f"{days} days"


@tool
def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: the arithmetic expression
    """
    return RESULT


@case("chat")
def chat() -> None:
    answer = plain.generate(MESSAGES)
    solved(answer.content)
    assert answer.token_usage.output_tokens > 0


@case("chat stream")
def chat_stream() -> None:
    solved("".join(delta.content or "" for delta in plain.generate_stream(MESSAGES)))


@case("stop sequences")
def stop() -> None:
    answer = plain.generate(MESSAGES, stop_sequences=["####"])
    assert "####" not in answer.content


@case("typed output")
def typed_output() -> None:
    schema = {"name": "forecast", "schema": PARAMETERS, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    is_weather(typed.generate(MESSAGES, response_format=form).content)


@case("tools required")
def tools_required() -> None:
    answer = typed.generate(MESSAGES, tools_to_call_from=[count])
    name, arguments = answer.tool_calls[0].function.name, answer.tool_calls[0].function.arguments
    assert name == "count"
    # The schema that smolagents sends leaves room for more arguments.
    assert "days" in (arguments if isinstance(arguments, dict) else json.loads(arguments))


@case("tools auto")
def tools_auto() -> None:
    answer = plain.generate(
        [{"role": "user", "content": PRODUCT}], tools_to_call_from=[calculator], tool_choice="auto"
    )
    [call] = answer.tool_calls
    is_product(call.function.name, call.function.arguments)


@case("tool-calling agent, one step")
def agent() -> None:
    """The model was not trained to call tools: a step may call either tool, or end the run with its answer."""
    made = ToolCallingAgent(tools=[count], model=typed, max_steps=1, verbosity_level=0)
    made.run(QUESTION)
    assert made.memory.steps[1].model_output_message.tool_calls


@case("tool-calling agent, streamed")
def streamed_agent() -> None:
    made = ToolCallingAgent(tools=[count], model=typed, max_steps=1, verbosity_level=0, stream_outputs=True)
    list(made.run(QUESTION, stream=True))
    assert made.memory.steps[1].model_output_message.tool_calls


@case("code agent with typed steps")
def code_agent() -> None:
    made = CodeAgent(
        tools=[], model=typed, max_steps=1, verbosity_level=0, use_structured_outputs_internally=True
    )
    made.run(QUESTION)
    assert made.memory.steps[1].model_output_message is not None


if __name__ == "__main__":
    features.run()
