"""Tools and reasoning through the HTTP side, with scripted answers in Qwen3's format."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from common.grammar import GrammarCompiler
from router.chat.answer_style import AnswerStyle
from router.chat.call_formats import CALL_FORMATS
from router.tokens.tokenizer import Tokenizer
from tests.unit.router.chat.wire_formats import CLOCK, OBJECT_CALLS, THOUGHT, TOOLS, WEATHER, template_of
from tests.unit.router.conftest import SERVED, TINY, Rig, Serve
from tests.unit.router.scripted_generator import delta, one_by_one

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
STYLE = AnswerStyle(template_of("qwen3"), template_variables=frozenset({"enable_thinking"}))


@pytest.fixture
async def rig(serve: Serve) -> Rig:
    return await serve(served=replace(SERVED, answers=STYLE))


def answers(rig: Rig, tokenizer: Tokenizer, text: str, finish_reason: str = "length") -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if finish_reason == "stop":
        ids.append(2)
    rig.generator.will(*one_by_one(ids, finish_reason))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def chunks_of(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    raw = (await rig.raw(CHAT, body | {"stream": True})).decode()
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Put the deltas of a stream together, as the clients do."""
    message: dict[str, Any] = {}
    reason = ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for call in value:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert call["function"]["arguments"] == ""
                    calls.append({key: call[key] for key in ("id", "type", "function")})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


async def test_calls_and_reasoning_whole_and_streamed(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, THOUGHT + OBJECT_CALLS, "stop")
    body = ASK | {"tools": TOOLS}
    status, answer, _ = await rig.post(CHAT, body)
    assert status == 200, answer
    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] is None
    assert message["reasoning_content"] == "They want {the} weather."
    assert [each["function"] for each in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris", "days": 3}'},
        {"name": "clock", "arguments": "{}"},
    ]
    ids = [each["id"] for each in message["tool_calls"]]
    assert all(each.startswith("call_") for each in ids)
    assert len(set(ids)) == 2

    streamed, reason = joined(await chunks_of(rig, body))
    assert reason == "tool_calls"
    assert streamed["content"] == ""
    assert streamed["reasoning_content"] == message["reasoning_content"]
    assert [each["function"] for each in streamed["tool_calls"]] == [
        each["function"] for each in message["tool_calls"]
    ]


async def test_arguments_are_streamed_in_pieces(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, OBJECT_CALLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks_of(rig, ASK | {"tools": TOOLS})]
    pieces = [each for each in deltas if each.get("tool_calls", [{}])[0].get("index") == 0]
    assert len(pieces) > 5


async def test_an_answer_without_calls(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, THOUGHT + "It rains.", "stop")
    _, answer, _ = await rig.post(CHAT, ASK)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It rains.",
        "refusal": None,
        "reasoning_content": "They want {the} weather.",
    }
    streamed, reason = joined(await chunks_of(rig, ASK))
    assert (streamed["content"], reason) == ("It rains.", "stop")


@pytest.mark.parametrize(
    ("stop", "parallel", "reason", "arguments"),
    [
        ("Paris", True, "stop", ['{"city": "']),
        ("Paris", False, "stop", ['{"city": "']),
        ("</tool_call>", True, "tool_calls", ['{"city": "Paris"}']),
    ],
)
async def test_a_call_that_a_stop_string_cuts_off_is_not_to_be_run(
    rig: Rig, tokenizer: Tokenizer, stop: str, parallel: bool, reason: str, arguments: list[str]
) -> None:
    """A client that sees `tool_calls` runs them, and these arguments are no JSON."""
    answers(
        rig, tokenizer, '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>', "stop"
    )
    body = ASK | {"tools": TOOLS, "stop": stop, "parallel_tool_calls": parallel}
    _, answer, _ = await rig.post(CHAT, body)
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    assert [each["function"]["arguments"] for each in choice["message"]["tool_calls"]] == arguments
    _, streamed = joined(await chunks_of(rig, body))
    assert streamed == reason


async def test_a_cut_call_after_the_only_one_that_is_shown_changes_nothing(
    rig: Rig, tokenizer: Tokenizer
) -> None:
    answers(rig, tokenizer, OBJECT_CALLS[: OBJECT_CALLS.rindex("{}}")], "stop")
    for parallel, reason in ((False, "tool_calls"), (True, "stop")):
        _, answer, _ = await rig.post(CHAT, ASK | {"tools": TOOLS, "parallel_tool_calls": parallel})
        assert answer["choices"][0]["finish_reason"] == reason


async def test_calls_without_tools_are_text(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, OBJECT_CALLS)
    for body in (ASK, ASK | {"tools": TOOLS, "tool_choice": "none"}):
        _, answer, _ = await rig.post(CHAT, body)
        assert answer["choices"][0]["message"]["content"] == OBJECT_CALLS
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_only_the_first_call_without_parallel_calls(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, OBJECT_CALLS)
    body = ASK | {"tools": TOOLS, "parallel_tool_calls": False}
    _, answer, _ = await rig.post(CHAT, body)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    streamed, _ = joined(await chunks_of(rig, body))
    assert len(streamed["tool_calls"]) == 1


async def test_fields_of_reasoning(rig: Rig, tokenizer: Tokenizer) -> None:
    answers(rig, tokenizer, THOUGHT + "It rains.")
    hidden: list[dict[str, Any]] = [
        {"include_reasoning": False},
        {"reasoning": {"exclude": True}},
        {"thinking": {"type": "enabled", "display": "omitted"}},
    ]
    for fields in hidden:
        _, answer, _ = await rig.post(CHAT, ASK | fields)
        assert answer["choices"][0]["message"]["content"] == "It rains."
        assert "reasoning_content" not in answer["choices"][0]["message"]
    _, answer, _ = await rig.post(CHAT, ASK | {"separate_reasoning": False})
    assert answer["choices"][0]["message"]["content"] == THOUGHT + "It rains."


async def test_tokens_of_reasoning_are_counted(rig: Rig, tokenizer: Tokenizer) -> None:
    """As at OpenAI, whether the client sees the reasoning or not. Where it is part of the content it is not counted."""
    answers(rig, tokenizer, THOUGHT + "It rains.", "stop")
    _, answer, _ = await rig.post(CHAT, ASK)
    details = answer["usage"]["completion_tokens_details"]
    assert answer["usage"]["reasoning_tokens"] == details["reasoning_tokens"]
    assert 5 < details["reasoning_tokens"] < answer["usage"]["completion_tokens"] - 3
    for fields in {"include_reasoning": False}, {"return_token_ids": True}:
        _, answer, _ = await rig.post(CHAT, ASK | fields)
        assert answer["usage"]["completion_tokens_details"] == details
    chunks = await chunks_of(rig, ASK | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"] == answer["usage"]
    _, answer, _ = await rig.post(CHAT, ASK | {"separate_reasoning": False})
    assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("<think>\nThey want it.\n</think>\n\nIt rains.", "</think>"),
        ("\n<think>They</think>", "</think>"),
        ("<think></think>It rains.", "</think>"),
        ("<think>They want <b>it</b> now", None),
        ("It rains.", ""),
        (f"{THOUGHT}It rains. {OBJECT_CALLS}", "</think>"),
    ],
)
async def test_tokens_of_reasoning_do_not_depend_on_pieces(
    rig: Rig, tokenizer: Tokenizer, text: str, end: str | None
) -> None:
    """Speculation and slow readers change which tokens arrive together."""
    ids = tokenizer.encode(text, False)
    offsets = [len(tokenizer.decode(ids[:count], False)) for count in range(len(ids))]
    first = text.find("<think>") + len("<think>")
    last = len(text) if end is None else text.index(end)
    expected = sum(first <= each < last for each in offsets) if end != "" else 0
    body = ASK | {"tools": TOOLS}
    rng = random.Random(text)
    for size in (1, 2, 3, 5, len(ids), 0, 0):
        deltas, at = [], 0
        while at < len(ids):
            count = size or rng.randint(1, 6)
            deltas.append(delta(ids[at : at + count], "length" if at + count >= len(ids) else None, 0))
            at += count
        rig.generator.scripts = [deltas]
        _, answer, _ = await rig.post(CHAT, body)
        assert answer["usage"]["reasoning_tokens"] == expected, size
        chunks = await chunks_of(rig, body | {"stream_options": {"include_usage": True}})
        assert chunks[-1]["usage"]["reasoning_tokens"] == expected, size


async def test_reasoning_in_one_piece(rig: Rig, tokenizer: Tokenizer) -> None:
    for text, content in ((THOUGHT + "It rains.", "It rains."), (THOUGHT.split("</think>")[0], "")):
        answers(rig, tokenizer, text)
        deltas = [
            each["choices"][0]["delta"] for each in await chunks_of(rig, ASK | {"stream_reasoning": False})
        ]
        shown = [each["reasoning_content"] for each in deltas if "reasoning_content" in each]
        assert shown == ["They want {the} weather."]
        assert "".join(each.get("content", "") for each in deltas) == content
        rig.generator.scripts.clear()


async def test_both_names_of_reasoning(serve: Serve, tokenizer: Tokenizer) -> None:
    style = replace(STYLE, reasoning_fields=("reasoning_content", "reasoning"))
    rig = await serve(served=replace(SERVED, answers=style))
    answers(rig, tokenizer, THOUGHT + "It rains.")
    _, answer, _ = await rig.post(CHAT, ASK)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "They want {the} weather."
    streamed, _ = joined(await chunks_of(rig, ASK))
    assert streamed["reasoning"] == message["reasoning"]


async def test_log_probabilities_of_every_token(rig: Rig, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(THOUGHT + OBJECT_CALLS, add_special_tokens=False)
    rig.generator.will(*one_by_one(ids, "length", top=1))
    body = ASK | {"tools": TOOLS, "logprobs": True}
    _, answer, _ = await rig.post(CHAT, body)
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(ids)
    chunks = await chunks_of(rig, body)
    listed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(each["content"]) for each in listed if each) == len(ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS + TOOLS[:1]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "x" * 1025}}, "chat_template_kwargs.enable_thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": 1.0}, "reasoning_effort"),
        ({"reasoning_effort": -0.1}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "a"}}]}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
async def test_refusals_name_the_field(rig: Rig, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = await rig.post(CHAT, ASK | fields)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_bounds_of_parameters(rig: Rig) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": deep}
    for parameters in (deep, {"enum": [0] * 60_000}, {"maximum": 1 << 70}):
        tool = {"type": "function", "function": {"name": "a", "parameters": parameters}}
        status, answer, _ = await rig.post(CHAT, ASK | {"tools": [tool]})
        assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters")


async def test_a_model_without_a_known_format_takes_no_tools(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve()
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": TOOLS})
    assert (status, answer["error"]["param"]) == (400, "tools")
    answers(rig, tokenizer, THOUGHT + "It rains.")
    _, answer, _ = await rig.post(CHAT, ASK | {"tools": TOOLS, "tool_choice": "none"})
    assert answer["choices"][0]["message"]["content"] == THOUGHT + "It rains."


async def test_a_forced_call(serve: Serve, tokenizer: Tokenizer) -> None:
    """The grammar that nodes get forces the call; a named call ends with `stop`, as in OpenAI's API."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    answers(rig, tokenizer, call, "stop")
    named = {"type": "function", "function": {"name": "clock"}}
    for choice, reason, refused in (
        ("required", "tool_calls", "It rains."),
        (named, "stop", call.replace("clock", "weather")),
    ):
        _, answer, _ = await rig.post(CHAT, ASK | {"tools": TOOLS, "tool_choice": choice})
        [found] = answer["choices"]
        assert found["finish_reason"] == reason
        assert [each["function"]["name"] for each in found["message"]["tool_calls"]] == ["clock"]
        grammar = rig.generator.requests[-1].sampling.grammar
        matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(grammar)
        for text, legal in ((call, True), (f"<think>hm</think>\n\n{call}", True), (refused, False)):
            assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) is legal, text


async def test_strict_functions(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, "It rains.")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": [strict, CLOCK]})
    assert status == 200, answer
    assert "piece*" in rig.generator.requests[-1].sampling.grammar
    await rig.post(CHAT, ASK | {"tools": TOOLS})
    assert rig.generator.requests[-1].sampling.grammar == ""


async def test_strict_functions_in_llama_3s_format(serve: Serve, tokenizer: Tokenizer) -> None:
    """A call at the beginning of the answer, without a marker."""
    style = AnswerStyle(template_of("llama3"), calls=CALL_FORMATS["llama3"])
    rig = await serve(served=replace(SERVED, answers=style))
    call = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
    answers(rig, tokenizer, call, "stop")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": [strict, CLOCK]})
    assert status == 200, answer
    [found] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"city": "Paris", "days": 3}
    grammar = rig.generator.requests[-1].sampling.grammar
    matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(grammar)
    for text, legal in (
        (call, True),
        ("It rains.", True),
        ('{"rain": true}', True),
        (call.replace("3", '"x"'), False),
        (call.replace("weather", "rain"), False),
    ):
        assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) is legal, text


async def test_structured_output_begins_after_the_reasoning(serve: Serve, tokenizer: Tokenizer) -> None:
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, "{}")
    body = ASK | {"response_format": {"type": "json_object"}}
    status, answer, _ = await rig.post(CHAT, body)
    assert status == 200, answer
    grammar = rig.generator.requests[-1].sampling.grammar
    matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(grammar)
    for text, legal in (
        ("{}", True),
        (" {}", True),
        ("<think>\nhm</think>{}", True),
        ("hm", False),
        ("<think>{}", False),
    ):
        assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) is legal, text


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_typed_text_leaves_calls_possible(serve: Serve, tokenizer: Tokenizer, choice: str) -> None:
    """Agents send the form of their final answer with every request, beside their tools."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    answers(rig, tokenizer, call)
    body = ASK | {"tools": TOOLS, "tool_choice": choice, "response_format": {"type": "json_object"}}
    status, answer, _ = await rig.post(CHAT, body)
    assert status == 200, answer
    assert bool(answer["choices"][0]["message"].get("tool_calls")) == (choice != "none")
    grammar = rig.generator.requests[-1].sampling.grammar
    matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(grammar)
    for text, choices in (("{}", ("auto", "none")), (call, ("auto", "required")), ("hm", ())):
        assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) == (choice in choices), text


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_typed_text_in_llama_3s_format(
    serve: Serve, tokenizer: Tokenizer, strict: bool, choice: str
) -> None:
    """No marker tells calls from JSON, so an answer that is not forced to call is always that JSON."""
    style = AnswerStyle(template_of("llama3"), calls=CALL_FORMATS["llama3"])
    rig = await serve(served=replace(SERVED, answers=style))
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    typed = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
    call = '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}'
    answers(rig, tokenizer, call if choice == "required" else '{"age": 5}')
    body = ASK | {"tools": [tool], "tool_choice": choice, "response_format": typed}
    status, answer, _ = await rig.post(CHAT, body)
    assert status == 200, answer
    grammar = rig.generator.requests[-1].sampling.grammar
    matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(grammar)
    for text, wanted in (('{"age": 5}', "auto"), (call, "required"), ("It rains.", "")):
        assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) == (wanted == choice), text


@pytest.mark.parametrize("strict", [False, True])
async def test_structural_tags_beside_tools(serve: Serve, tokenizer: Tokenizer, strict: bool) -> None:
    """Tags constrain an answer that may call tools; a strict tool constrains it, too, and only one of them can."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, "hm")
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": strict}}
    tags = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": [tool], "response_format": tags})
    if strict:
        assert (status, answer["error"]["param"]) == (400, "response_format")
        return
    assert status == 200, answer
    matcher = GrammarCompiler((TINY / "tokenizer.json").read_text(), 704, [2]).matcher(
        rig.generator.requests[-1].sampling.grammar
    )
    for text, legal in (("hm", True), ("hm <f>5</f>", True), ("hm <f>x</f>", False)):
        assert matcher.fork().accept([*tokenizer.encode(text, False), 2]) is legal, text


async def test_other_constraints_are_not_combined_with_forced_calls(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, "{}")
    body = ASK | {"tools": TOOLS, "tool_choice": "required", "regex": "a"}
    status, answer, _ = await rig.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "regex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "function": {"name": "clock"}}},
            "tool_choice.type",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "clock")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "clock", "x")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": TOOLS, "tool_choice": allowed("required", "clock")}, "tool_choice"),
    ],
)
async def test_choices_that_cannot_be_forced(rig: Rig, fields: dict[str, Any], param: str) -> None:
    status, answer, _ = await rig.post(CHAT, ASK | fields)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}])
async def test_a_schema_that_cannot_be_compiled_is_one_of_the_tools(
    serve: Serve, fields: dict[str, Any]
) -> None:
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    wrong = {"name": "a", "strict": True, "parameters": {"type": "strin"}}
    status, answer, _ = await rig.post(
        CHAT, ASK | fields | {"tools": [{"type": "function", "function": wrong}]}
    )
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "Invalid type: strin" in answer["error"]["message"]


async def test_why_a_call_cannot_be_forced(rig: Rig) -> None:
    """Either there are no tools, or this model's format of calls is not known."""
    for tools, why in ({}, "there are no tools"), ({"tools": TOOLS}, "whose format of calls is known"):
        status, answer, _ = await rig.post(CHAT, ASK | tools | {"tool_choice": "required"})
        assert status == 400
        assert why in answer["error"]["message"]


@pytest.mark.parametrize("fields", [{}, {"tool_choice": {"function": {"name": "clock"}}}])
async def test_a_tool_without_a_type_is_a_function(
    serve: Serve, tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    """As in vLLM and SGLang, where the type may be left out."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "stop")
    untyped = [{"function": tool["function"]} for tool in TOOLS]
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": untyped} | fields)
    assert status == 200, answer
    typed = {name: {"type": "function"} | value for name, value in fields.items()}
    await rig.post(CHAT, ASK | {"tools": TOOLS} | typed)
    first, second = rig.generator.requests
    assert first.token_ids == second.token_ids
    assert first.sampling.grammar == second.sampling.grammar


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones(serve: Serve, tokenizer: Tokenizer, mode: str) -> None:
    """The answer is that to a request with these tools and this mode; strict tools that are left out do not count."""
    rig = await serve(served=replace(SERVED, answers=replace(STYLE, calls=CALL_FORMATS["qwen3"])))
    answers(rig, tokenizer, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "stop")
    strict = {"type": "function", "function": {"name": "strict", "strict": True}}
    fewer, more = [t for t in TOOLS if t["function"]["name"] == "clock"], [strict, *TOOLS]
    _, wanted, _ = await rig.post(CHAT, ASK | {"tools": fewer, "tool_choice": mode})
    _, found, _ = await rig.post(CHAT, ASK | {"tools": more, "tool_choice": allowed(mode, "clock")})
    assert found["choices"][0]["finish_reason"] == "tool_calls"
    assert found["usage"] == wanted["usage"]
    few, many = rig.generator.requests
    assert (many.token_ids, many.sampling.grammar) == (few.token_ids, few.sampling.grammar)
    assert bool(many.sampling.grammar) is (mode == "required")


async def test_custom_tools_are_refused_with_what_to_send(rig: Rig) -> None:
    custom = {"type": "custom", "custom": {"name": "code", "format": {"type": "text"}}}
    for path, tool, where in (
        (CHAT, custom, "tools[0].type"),
        ("/v1/responses", {"type": "custom", "name": "code"}, "tools[0]"),
    ):
        body = ASK if path == CHAT else {"input": "hi"}
        status, answer, _ = await rig.post(path, body | {"tools": [tool]})
        assert (status, answer["error"]["param"]) == (400, where)
        assert "declare one whose parameters are an object with one string" in answer["error"]["message"]


async def test_a_model_whose_calls_cannot_be_forced(rig: Rig) -> None:
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": TOOLS, "tool_choice": "required"})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    strict = {"type": "function", "function": {"name": "a", "strict": True}}
    status, answer, _ = await rig.post(CHAT, ASK | {"tools": [strict]})
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.strict")
