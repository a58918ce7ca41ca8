"""Tools and reasoning through /v1/responses and /v1/messages, with scripted answers in Qwen3's format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.apis.messages_request import read_messages
from router.apis.responses_request import read_responses
from router.chat.call_formats import CALL_FORMATS
from router.requests.chat_fields import AllowedTools, ChatToolChoice, ChosenFunction, ChosenTool
from router.requests.openai_schema import ChatRequest
from router.templates.chat_template import ChatTemplate
from router.text.work import TextWork
from router.tokens.tokenizer import Tokenizer
from tests.fakes.text_workers import InProcess
from tests.unit.router.apis import test_messages, test_responses
from tests.unit.router.chat.test_chat_tools_http import STYLE, answers
from tests.unit.router.chat.wire_formats import OBJECT_CALLS, THOUGHT, TOOLS
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import one_by_one

FUNCTIONS = [tool["function"] for tool in TOOLS]
THINKING = "They want {the} weather."
ARGUMENTS = '{"city": "Paris", "days": 3}'


@pytest.fixture
async def rig(serve: Serve, tokenizer: Tokenizer) -> Rig:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    answers(rig, tokenizer, THOUGHT + OBJECT_CALLS, "stop")
    return rig


async def test_calls_in_responses(rig: Rig) -> None:
    body = {"input": "Hello", "tools": [{"type": "function", **each} for each in FUNCTIONS]}
    status, answer, headers = await rig.post(test_responses.PATH, body)
    assert status == 200, answer
    thought, weather, clock = answer["output"]
    assert answer["status"] == "completed"
    assert thought["content"] == [{"type": "reasoning_text", "text": THINKING}]
    assert (weather["type"], weather["name"], weather["arguments"]) == ("function_call", "weather", ARGUMENTS)
    assert weather["id"] == f"fc_{headers['x-request-id']}_1"
    assert (clock["name"], clock["arguments"]) == ("clock", "{}")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 5

    found = test_responses.events(await rig.raw(test_responses.PATH, {**body, "stream": True}))
    arguments = [each for each in found if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(each["delta"] for each in arguments if each["output_index"] == 1) == ARGUMENTS
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert [each["type"] for each in done] == ["reasoning", "function_call", "function_call"]
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["output"] == done


@pytest.mark.parametrize(
    ("said", "stop", "statuses"),
    [
        # The marker is held back as text of a possible call until the answer ends.
        (THOUGHT + "<tool_ca", None, ["completed", "incomplete"]),
        (THOUGHT + OBJECT_CALLS.split("3}")[0], None, ["completed", "incomplete"]),
        (THOUGHT + OBJECT_CALLS, "3}", ["completed", "incomplete"]),
        (THOUGHT + OBJECT_CALLS, "{}", ["completed", "completed", "incomplete"]),
        (THOUGHT + OBJECT_CALLS.strip(), None, ["completed"] * 3),
    ],
)
async def test_items_that_are_cut_off_are_incomplete(
    rig: Rig, tokenizer: Tokenizer, said: str, stop: str | None, statuses: list[str]
) -> None:
    """Only the last one can be, and the events of a stream say the same of each as the answer at its end."""
    rig.generator.scripts.clear()
    answers(rig, tokenizer, said)
    body = {"input": "Hello", "tools": [{"type": "function", **each} for each in FUNCTIONS], "stop": stop}
    _, answer, _ = await rig.post(test_responses.PATH, body)
    assert [each["status"] for each in answer["output"]] == statuses
    found = test_responses.events(await rig.raw(test_responses.PATH, {**body, "stream": True}))
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == done
    assert [each["status"] for each in done] == statuses


@pytest.mark.parametrize("reasoning", [True, False])
async def test_log_probabilities_of_a_text_after_reasoning(
    serve: Serve, tokenizer: Tokenizer, reasoning: bool
) -> None:
    rig = await serve(served=replace(SERVED, answers=STYLE))
    rig.generator.will(*one_by_one(tokenizer.encode(THOUGHT + "It rains.", False), "length", 1))
    body = {"input": "Hello", "include": ["message.output_text.logprobs"], "include_reasoning": reasoning}
    _, answer, _ = await rig.post(test_responses.PATH, body)
    [part] = answer["output"][-1]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == "It rains."
    assert len(answer["output"]) == 1 + reasoning


async def test_log_probabilities_of_text_that_is_held_back_and_repeats_itself(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    """Each `<` may begin a marker, so it is told with what follows it."""
    rig = await serve(served=replace(SERVED, answers=STYLE))
    said = "cout <<<< x;"
    rig.generator.will(*one_by_one(tokenizer.encode(THOUGHT + said, False), "length", 1))
    body = {"input": "Hello", "include": ["message.output_text.logprobs"]}
    _, answer, _ = await rig.post(test_responses.PATH, body)
    [part] = answer["output"][-1]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"] == said


async def test_a_named_call_in_messages_ends_like_any_call(serve: Serve, tokenizer: Tokenizer) -> None:
    """Clients run tools while the reason is tool_use."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, OBJECT_CALLS.strip().split("</tool_call>")[0] + "</tool_call>", "stop")
    tool = {"name": "weather", "description": "x", "input_schema": {"type": "object"}}
    body = {"max_tokens": 900, "messages": [test_messages.USER], "tools": [tool]}
    body["tool_choice"] = {"type": "tool", "name": "weather"}
    status, answer, _ = await rig.post(test_messages.PATH, body)
    assert status == 200, answer
    assert ([each["type"] for each in answer["content"]], answer["stop_reason"]) == (["tool_use"], "tool_use")
    found = test_messages.events(await rig.raw(test_messages.PATH, {**body, "stream": True}))
    [delta] = [each["delta"] for each in found if each["type"] == "message_delta"]
    assert delta["stop_reason"] == "tool_use"


async def test_calls_in_messages(rig: Rig) -> None:
    tools = [
        {"name": each["name"], "description": "x", "input_schema": each.get("parameters", {"type": "object"})}
        for each in FUNCTIONS
    ]
    body: dict[str, Any] = {"max_tokens": 900, "messages": [test_messages.USER], "tools": tools}
    status, answer, _ = await rig.post(test_messages.PATH, body)
    assert status == 200, answer
    thought, weather, clock = answer["content"]
    assert (answer["stop_reason"], thought["thinking"]) == ("tool_use", THINKING)
    counted = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 < counted < answer["usage"]["output_tokens"]
    assert (weather["name"], weather["input"]) == ("weather", {"city": "Paris", "days": 3})
    assert (clock["type"], clock["input"]) == ("tool_use", {})

    found = test_messages.events(await rig.raw(test_messages.PATH, {**body, "stream": True}))
    starts = [each["content_block"]["type"] for each in found if each["type"] == "content_block_start"]
    assert starts == ["thinking", "tool_use", "tool_use"]
    deltas = [each for each in found if each["type"] == "content_block_delta" and each["index"] == 1]
    assert "".join(each["delta"]["partial_json"] for each in deltas) == ARGUMENTS
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": counted}


@pytest.mark.parametrize("said", ["I look.", None])
def test_calls_and_their_results_become_the_messages_of_a_chat(said: str | None) -> None:
    """Models that call a tool mostly say nothing else."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    items = [
        {"role": "user", "content": "Time?"},
        *([{"role": "assistant", "content": said}] if said else []),
        {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    ]
    use = {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "noon"}]}
    text = [{"type": "text", "text": said}] if said else []
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": [*text, use]},
        {"role": "user", "content": [result]},
    ]
    expected = msgspec.convert({"messages": chat}, ChatRequest).messages
    responses = read_responses(msgspec.json.encode({"input": items}))
    assert responses.chat.messages == expected
    given = read_messages(msgspec.json.encode({"max_tokens": 9, "messages": messages}))
    assert given.chat.messages == expected


def test_tool_choices() -> None:
    clock = ChosenFunction("clock")
    named = ChatToolChoice("function", clock)
    allowed = ChatToolChoice("allowed_tools", None, AllowedTools("required", [ChosenTool("function", clock)]))
    tool = {"type": "function", "name": "clock"}
    for given, expected in (
        ("auto", "auto"),
        (tool, named),
        ({"type": "allowed_tools", "mode": "required", "tools": [tool]}, allowed),
    ):
        body: dict[str, Any] = {"input": "x", "tool_choice": given}
        assert read_responses(msgspec.json.encode(body)).chat.tool_choice == expected
    for kind, chosen in (("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", named)):
        choice = {"type": kind, "name": "clock", "disable_parallel_tool_use": True}
        body = {"max_tokens": 9, "messages": [test_messages.USER], "tool_choice": choice}
        chat = read_messages(msgspec.json.encode(body)).chat
        assert (chat.tool_choice, chat.parallel_tool_calls) == (chosen, False)


SEARCH: dict[str, Any] = {"name": "search", "input_schema": {"type": "object"}}
DEFERRED = [{"name": name, "input_schema": {"type": "object"}, "defer_loading": True} for name in ("a", "b")]
FOUND: list[dict[str, Any]] = [
    test_messages.USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [{"type": "tool_reference", "tool_name": name} for name in ("b", "gone")],
            }
        ],
    },
]


@pytest.mark.parametrize(
    ("messages", "expected"), [([test_messages.USER], ["search"]), (FOUND, ["search", "b"])]
)
def test_a_deferred_tool_is_in_the_prompt_once_a_result_refers_to_it(
    messages: list[dict[str, Any]], expected: list[str]
) -> None:
    body = {"max_tokens": 9, "messages": messages, "tools": [*DEFERRED, SEARCH]}
    tools = read_messages(msgspec.json.encode(body)).chat.tools or []
    assert sorted(tool.function.name for tool in tools if tool.function) == sorted(expected)


def test_the_model_reads_which_tools_were_loaded() -> None:
    body = {"max_tokens": 9, "messages": FOUND, "tools": [*DEFERRED, SEARCH]}
    *_, result = read_messages(msgspec.json.encode(body)).chat.messages
    assert (result.role, result.content) == ("tool", "Loaded the tool b.\nLoaded the tool gone.\n")


@pytest.mark.parametrize("path", [test_messages.PATH, f"{test_messages.PATH}/count_tokens"])
@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"name": "a b"}, "tools[2].name"),
        ({"name": "f", "input_schema": test_responses.DEEP}, "tools[2].input_schema"),
        ({"name": "s", "type": "web_search_20250305"}, "tools[2]"),
    ],
)
async def test_refusals_count_deferred_tools(rig: Rig, tool: dict[str, Any], param: str, path: str) -> None:
    body = {"max_tokens": 9, "messages": [test_messages.USER], "tools": [*DEFERRED, tool]}
    status, answer, _ = await rig.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_a_reference_without_a_name_is_refused(rig: Rig) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference"}]}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    status, answer, _ = await rig.post(test_messages.PATH, body)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].content[0]")


@pytest.mark.parametrize("content", [[1], [{}], [{"type": "tool_reference"}], ["tool_reference"]])
@pytest.mark.parametrize("kind", ["text", "thinking", "redacted_thinking"])
def test_only_results_of_tools_refer_to_tools(kind: str, content: list[Any]) -> None:
    """Other blocks have no content, so theirs is an unknown field."""
    block = {"type": kind, "text": "a", "thinking": "b", "content": content}
    messages = [test_messages.USER, {"role": "assistant", "content": [block]}]
    body = {"max_tokens": 9, "messages": messages, "tools": DEFERRED}
    assert read_messages(msgspec.json.encode(body)).chat.tools is None


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
CALL = {"type": "tool_use", "id": "d", "name": "search", "input": {}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            test_messages.PATH,
            {
                "max_tokens": 9,
                "system": "Be brief.",
                "messages": [
                    {"role": "user", "content": [RESULT, {"type": "text", "text": "And now?"}]},
                    {"role": "assistant", "content": [CALL]},
                ],
            },
            "messages[1].tool_calls",
        ),
        (
            test_responses.PATH,
            {
                "instructions": "Be brief.",
                "input": [
                    {"role": "user", "content": "Hello"},
                    {"type": "function_call", "call_id": "d", "name": "search", "arguments": "{}"},
                ],
            },
            "input[1].tool_calls",
        ),
    ],
)
async def test_refusals_of_messages_have_the_index_that_the_client_knows(
    serve: Serve, tokenizer: Tokenizer, tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    """A message of the system and results of tools make more messages of the chat than the client sent."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    rig = await serve(workers=InProcess(TextWork(tokenizer, ChatTemplate(TINY, template))))
    for route in (path, path + ("/count_tokens" if path == test_messages.PATH else "/input_tokens")):
        status, answer, _ = await rig.post(route, body)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["message"].startswith(param.split(".")[0] + ": the chat template prints no")
