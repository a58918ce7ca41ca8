"""What of tools, calls and reasoning reaches the chat template: the same as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import InvalidRequest
from router.requests.chat_fields import Tool, check_tools, template_tools, template_variables
from router.requests.openai_schema import Message
from router.requests.reasoning_fields import ReasoningSwitch, ThinkingSwitch
from router.templates.chat_template import ChatTemplate
from tests.unit.router.chat.wire_formats import TOOLS
from tests.unit.router.conftest import TINY

# Written for this test in the manner of Qwen3's: tools as JSON, calls, results, reasoning, a variable of the client.
SOURCE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- if message.role == "tool" %}[{{ message.tool_call_id }}] {% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


def made(tmp_path: Path) -> ChatTemplate:
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    return ChatTemplate(tmp_path)


def sent(conversation: list[dict[str, Any]]) -> list[Message]:
    """The messages as a client of OpenAI's API sends them: arguments are JSON text."""
    as_text = json.loads(json.dumps(conversation))
    for message in as_text:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return msgspec.convert(as_text, list[Message])


def tools() -> list[dict[str, Any]]:
    return template_tools(check_tools(msgspec.convert(TOOLS, list[Tool])))


def test_equals_transformers(tmp_path: Path) -> None:
    import transformers

    reference = transformers.PreTrainedTokenizerFast.from_pretrained(TINY)
    reference.chat_template = SOURCE
    template = made(tmp_path)
    for variables in ({}, {"enable_thinking": False}):
        expected = reference.apply_chat_template(
            CONVERSATION, tools=TOOLS, tokenize=False, add_generation_prompt=True, **variables
        )
        assert template.render(sent(CONVERSATION), tools=tools(), variables=variables) == expected
        as_objects = msgspec.convert(CONVERSATION, list[Message])
        assert template.render(as_objects, tools=tools(), variables=variables) == expected
    assert '"city": "Zürich"' in expected
    assert expected.endswith("<think>\n\n</think>\n\n")


def test_clients_cannot_replace_messages_or_tokens(tmp_path: Path) -> None:
    template = made(tmp_path)
    plain = template.render([Message("user", "a")])
    variables = {"messages": "x", "tools": ["x"], "add_generation_prompt": False}
    assert template.render([Message("user", "a")], variables=variables) == plain


def test_arguments_must_be_the_text_of_an_object(tmp_path: Path) -> None:
    template = made(tmp_path)
    for arguments in ("{", "[1]", '"a"', "[" * 100_000, '{"a": "\\ud800'):
        call = {"function": {"name": "a", "arguments": arguments}}
        messages = msgspec.convert([{"role": "assistant", "tool_calls": [call]}], list[Message])
        with pytest.raises(InvalidRequest, match="must be the JSON text of an object") as found:
            template.render(messages)
        assert found.value.param == "messages[0].tool_calls[0].function.arguments"
    nothing: tuple[Any, ...] = ("", " ", None, "{}", {})
    for empty in nothing:
        call = {"function": {"name": "a", "arguments": empty}}
        messages = msgspec.convert([{"role": "assistant", "tool_calls": [call]}], list[Message])
        assert '"arguments": {}}' in template.render(messages)


def test_effort_decides_about_thinking_unless_the_client_does() -> None:
    allowed = frozenset({"enable_thinking"})
    assert template_variables(None, None, allowed) == {}
    assert template_variables(None, "none", allowed) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    assert template_variables({"enable_thinking": False}, "high", allowed)["enable_thinking"] is False
    one_object = ReasoningSwitch(effort="low", enabled=False)
    assert template_variables(None, "high", allowed, one_object) == {
        "reasoning_effort": "low",
        "enable_thinking": False,
        "thinking": False,
    }
    assert template_variables({"enable_thinking": True}, None, allowed, one_object)["enable_thinking"] is True
    assert template_variables(None, "high", allowed, ReasoningSwitch())["reasoning_effort"] == "high"
    off = {"enable_thinking": False, "thinking": False}
    given = ReasoningSwitch(enabled=True), ThinkingSwitch("disabled")
    assert template_variables(None, None, allowed, *given) == off
    on = template_variables(None, None, allowed, one_object, ThinkingSwitch("enabled"))
    assert on["enable_thinking"] is on["thinking"] is True
    assert template_variables(None, None, allowed, ReasoningSwitch(enable=False)) == off
    named = ReasoningSwitch(reasoning_effort="none"), ThinkingSwitch("adaptive")
    assert template_variables(None, "high", allowed, *named) == {
        "reasoning_effort": "none",
        "enable_thinking": True,
        "thinking": True,
    }
    kept = ThinkingSwitch("disabled", clear_thinking=False)
    assert template_variables(None, None, allowed | {"clear_thinking"}, None, kept) == {
        **off,
        "clear_thinking": False,
    }
    with pytest.raises(InvalidRequest, match=r"model\.chat_template_kwargs") as found:
        template_variables(None, None, allowed, None, kept)
    assert found.value.param == "thinking.clear_thinking"
    for effort in (0, 0.25):
        thinking = {"enable_thinking": True, "thinking": True}
        assert template_variables(None, effort, allowed) == {"reasoning_effort": effort, **thinking}
    with pytest.raises(InvalidRequest, match=r"model\.chat_template_kwargs") as found:
        template_variables({"date_string": "x"}, None, allowed)
    assert found.value.param == "chat_template_kwargs.date_string"
