"""Functions in namespaces, as /v1/responses takes them: one name in the prompt, two in requests and answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from router.apis.responses_request import read_responses
from router.chat.call_formats import CALL_FORMATS
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.apis.test_responses import PATH, events
from tests.unit.router.chat.test_chat_tools_http import STYLE, answers
from tests.unit.router.conftest import SERVED, Serve

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FORECAST: dict[str, Any] = {
    "type": "function",
    "name": "forecast",
    "description": "Says tomorrow's weather.",
    "parameters": PARAMETERS,
    "strict": False,
}
NOW: dict[str, Any] = {"type": "function", "name": "now", "description": "Says today's weather."}
WEATHER: dict[str, Any] = {
    "type": "namespace",
    "name": "weather",
    "description": "All about the weather.",
    "tools": [FORECAST, NOW],
}
# a function outside the namespace may have the name of one inside
TOOLS: list[dict[str, Any]] = [WEATHER, {**NOW, "description": "Says the time."}]
ARGUMENTS = '{"city": "Paris"}'
CALLS = (
    f'<tool_call>\n{{"name": "weather__forecast", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def read(body: dict[str, Any]) -> Any:
    return msgspec.to_builtins(read_responses(msgspec.json.encode(body)).chat)


async def test_calls_name_the_function_and_its_namespace(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    answers(rig, tokenizer, CALLS, "stop")
    status, answer, _ = await rig.post(PATH, {"input": "Hello", "tools": TOOLS})
    assert status == 200, answer
    forecast, now = answer["output"]
    assert (forecast["namespace"], forecast["name"]) == ("weather", "forecast")
    assert forecast["arguments"] == ARGUMENTS
    assert (now["name"], "namespace" in now) == ("now", False)
    shown, _ = answer["tools"]
    assert (shown["type"], shown["name"], shown["description"]) == tuple(
        WEATHER[field] for field in ("type", "name", "description")
    )
    assert shown["tools"][0] == FORECAST

    found = events(await rig.raw(PATH, {"input": "Hello", "tools": TOOLS, "stream": True}))
    for kind in ("response.output_item.added", "response.output_item.done"):
        item = next(each["item"] for each in found if each["type"] == kind)
        assert (item["namespace"], item["name"]) == ("weather", "forecast")
    done = [each["name"] for each in found if each["type"] == "response.function_call_arguments.done"]
    assert done == ["forecast", "now"]


async def test_a_large_body_is_answered_in_the_same_way(serve: Serve, tokenizer: Tokenizer) -> None:
    """A text worker reads it."""
    rig = await serve(served=replace(SERVED, answers=STYLE))
    answers(rig, tokenizer, CALLS, "stop")
    raw = msgspec.json.encode({"input": "Hello", "tools": TOOLS}) + b" " * (1 << 16)
    status, answer, _ = await rig.post(PATH, raw)
    assert (status, answer["output"][0].get("namespace")) == (200, "weather")


def test_the_prompt_has_one_name_per_function_and_the_description_of_the_namespace_once() -> None:
    functions = [tool["function"] for tool in read({"input": "x", "tools": TOOLS})["tools"]]
    assert [(each["name"], each["description"]) for each in functions] == [
        ("weather__forecast", "All about the weather.\n\nSays tomorrow's weather."),
        ("weather__now", "Says today's weather."),
        ("now", "Says the time."),
    ]
    assert (functions[0]["parameters"], functions[0]["strict"]) == (PARAMETERS, False)


def test_a_call_that_is_sent_back_has_the_same_name_in_the_prompt() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "forecast", "arguments": ARGUMENTS}
    [message] = read({"input": [{**call, "namespace": "weather"}]})["messages"]
    assert message["tool_calls"][0]["function"]["name"] == "weather__forecast"


async def test_a_function_of_a_namespace_can_be_forced(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, CALLS.split("\n<tool_call>")[0], "stop")
    choice = {"type": "function", "name": "forecast", "namespace": "weather"}
    status, answer, _ = await rig.post(PATH, {"input": "x", "tools": TOOLS, "tool_choice": choice})
    assert status == 200, answer
    assert (answer["output"][0]["namespace"], answer["tool_choice"]) == ("weather", choice)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    chosen = read({"input": "x", "tools": TOOLS, "tool_choice": allowed})["tool_choice"]["allowed_tools"]
    assert [tool["function"]["name"] for tool in chosen["tools"]] == ["weather__forecast"]


async def test_allowed_tools_are_repeated_as_they_were_sent(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    answers(rig, tokenizer, "no", "stop")
    forecast = {"type": "function", "name": "forecast", "namespace": "weather"}
    named = [{"type": "function", "name": "now"}, forecast]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    status, answer, _ = await rig.post(PATH, {"input": "x", "tools": TOOLS, "tool_choice": choice})
    assert (status, answer["tool_choice"]) == (200, choice)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": [NOW]}], "tools[0].name"),
        ([WEATHER, {"type": "web_search"}], "tools[1]"),
        ([{**WEATHER, "tools": [{"type": "custom", "name": "patch"}]}], "tools[0].tools[0]"),
        ([{**WEATHER, "tools": [WEATHER]}], "tools[0].tools[0]"),
        ([{**WEATHER, "tools": [NOW, {**NOW, "name": ""}]}], "tools[0].tools[1].name"),
        ([{**WEATHER, "tools": [NOW, {**NOW, "name": "a b"}]}], "tools[0].tools[1].name"),
        ([WEATHER, {**NOW, "name": "a b"}], "tools[1].name"),
        ([WEATHER, {**NOW, "name": "weather__now"}], "tools[1].name"),
        ([WEATHER, WEATHER], "tools[1].tools[0].name"),
    ],
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/input_tokens"])
async def test_refusals_name_the_function(
    serve: Serve, tools: list[dict[str, Any]], param: str, path: str
) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    status, answer, _ = await rig.post(path, {"input": "x", "tools": tools})
    assert (status, answer["error"]["param"]) == (400, param), answer
