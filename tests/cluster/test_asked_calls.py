"""What the program of tool calls finds wrong. No cluster runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.asked_calls import AskedChat, asked_chats, put_together

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOLS = [{"function": {"name": name, "parameters": PARAMETERS}} for name in ("calc", "eval")]
GOOD = ("calc", {"expression": "1+1"})
NAMED = {"function": {"name": "eval"}}
AUTO = AskedChat("call/0", "auto", {"tools": TOOLS, "parallel_tool_calls": True})


@pytest.mark.parametrize(
    ("choice", "calls", "written", "told"),
    [
        ("auto", [GOOD], [GOOD], ""),
        ("auto", [GOOD], None, ""),
        ("auto", [("other", {})], [("other", {})], ""),
        ("auto", [], [GOOD], "its text"),
        ("strict", [], [], ""),
        ("strict", [("calc", {})], [("calc", {})], "no tool takes"),
        ("required", [GOOD], [GOOD], ""),
        ("required", [], [], "no call"),
        ("required", [("calc", {"expression": 2})], None, "no tool takes"),
        ("required", [("other", {})], None, "no tool takes"),
        ("named", [GOOD], None, "no tool takes"),
        ("named", [("eval", GOOD[1])], None, ""),
    ],
)
def test_calls_that_are_wrong(choice: str, calls: list[Any], written: list[Any] | None, told: str) -> None:
    asked = replace(AUTO, choice=choice, body={**AUTO.body, "tool_choice": NAMED})
    found = asked.defect(calls, written)
    assert told in found
    assert bool(found) == bool(told)


def test_only_the_first_call_is_passed_on_without_parallel_calls() -> None:
    one = replace(AUTO, body={**AUTO.body, "parallel_tool_calls": False})
    assert one.defect([GOOD], [GOOD, GOOD]) == ""
    assert one.defect([GOOD, GOOD], [GOOD, GOOD])


def test_a_stream_is_put_together_and_its_error_is_one() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "I need it."},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "calc", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": delta, "token_ids": [number], "finish_reason": None}]}
        for number, delta in enumerate(deltas)
    ]
    events[0]["prompt_token_ids"] = [7, 8]
    events[-1]["choices"][0]["finish_reason"] = "tool_calls"
    status, answer = put_together(events)
    (choice,) = answer["choices"]
    assert (status, answer["prompt_token_ids"]) == (200, [7, 8])
    assert (choice["token_ids"], choice["finish_reason"]) == ([0, 1, 2, 3, 4, 5], "tool_calls")
    assert choice["message"]["reasoning_content"] == "I need it."
    assert choice["message"]["tool_calls"] == [{"function": {"name": "calc", "arguments": '{"a": 1}'}}]
    assert put_together([*events[:2], {"error": {"message": "lost"}}])[0] == 500


def test_chats_are_the_same_again_and_of_every_choice() -> None:
    names = [f"call/{number}" for number in range(20)]
    asked = [each for name in names for each in asked_chats(name)]
    assert asked == [each for name in names for each in asked_chats(name)]
    assert {each.choice for each in asked} == {"auto", "strict", "required", "named"}
