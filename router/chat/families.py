"""Response templates for families whose checkpoints have none, chosen by the contents of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_THINK: dict[str, Any] = {"open": "<think>", "close": "</think>", "content": "text"}
_CHATML = "<|im_start|>assistant\n"
_OBJECT_CALL: dict[str, Any] = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
_NAMED: dict[str, Any] = {
    "type": "function",
    "function": {"name": "{name}", "arguments": "{content}"},
}
_QWEN_END = {"close": ["<|im_end|>", "<|endoftext|>"], "content": "text"}


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """The marks by which a family of models structures its answers.

    Attributes:
        marks: what a chat template of this family contains: all of them.
        template: the response template.
        tag_end: the literal that ends each argument in a format with tags.
        short_ids: the chat template takes only call ids of nine letters and digits.
    """

    name: str
    marks: tuple[str, ...]
    template: Mapping[str, Any]
    tag_end: str | None = None
    short_ids: bool = False


def _template(anchor: str, fields: dict[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType({"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields})


# A chat template belongs to the first family whose marks it has.
FAMILIES = (
    ChatFamily(
        "qwen3_5",
        ("<tool_call>", "<function=", "<parameter="),
        _template(
            _CHATML,
            {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                    "close_pattern": r"</function>\s*</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                    },
                    "transform": _NAMED,
                },
                "content": _QWEN_END,
            },
        ),
        tag_end="</parameter>",
    ),
    ChatFamily(
        "glm4_5",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        _template(
            "<|assistant|>",
            {
                "reasoning_content": _THINK,
                "tool_calls": {
                    "open_pattern": r"<tool_call>\s*(?P<name>[^\s<]+)",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": (
                            r"<arg_key>\s*(?P<key>[^<]{1,256}?)\s*</arg_key>\s*"
                            r"<arg_value>\n?(?P<value>.*?)\n?</arg_value>"
                        )
                    },
                    "transform": _NAMED,
                },
                "content": {
                    "close": ["<|user|>", "<|observation|>", "<|endoftext|>"],
                    "content": "text",
                },
            },
        ),
        tag_end="</arg_value>",
    ),
    ChatFamily(
        "qwen3",
        ("<tool_call>", "<think>"),
        _template(
            _CHATML,
            {"reasoning_content": _THINK, "tool_calls": _OBJECT_CALL, "content": _QWEN_END},
        ),
    ),
    # also Hermes and other models with its format
    ChatFamily(
        "qwen2_5",
        ("<tool_call>",),
        _template(_CHATML, {"tool_calls": _OBJECT_CALL, "content": _QWEN_END}),
    ),
    ChatFamily(
        "mistral_v11",
        ("[TOOL_CALLS]", "[ARGS]"),
        _template(
            "[/INST]",
            {
                "reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
                "tool_calls": {
                    "open_pattern": r"\[TOOL_CALLS\]\s*(?P<name>[^\[\s{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
                    "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
                    "repeats": True,
                    "content": "json",
                    "transform": _NAMED,
                },
                "content": {"close": "</s>", "content": "text"},
            },
        ),
        short_ids=True,
    ),
    ChatFamily(
        "mistral_v3",
        ("[TOOL_CALLS]",),
        _template(
            "[/INST]",
            {
                "tool_calls": {
                    "open": "[TOOL_CALLS]",
                    "content": "json",
                    "transform": {
                        "type": "function",
                        "function": {"name": "{name}", "arguments": "{arguments}"},
                    },
                    "transform_each": True,
                },
                "content": {"close": "</s>", "content": "text"},
            },
        ),
        short_ids=True,
    ),
    ChatFamily(
        "llama3",
        ("<|start_header_id|>", "parameters"),
        _template(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            {
                "tool_calls": {
                    "open_pattern": (
                        r"(?:\A\s*|<\|python_tag\|>\s*)"
                        r'(?=\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'
                    ),
                    "content": "json",
                    "transform": {
                        "type": "function",
                        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
                    },
                },
                "content": {"close": ["<|eot_id|>", "<|eom_id|>"], "content": "text"},
            },
        ),
    ),
    # reasoning without a format of tool calls that is known here
    ChatFamily(
        "think",
        ("</think>",),
        MappingProxyType(
            {
                "start_anchor_pattern": r"<\|im_start\|>assistant\n|<｜Assistant｜>|<\|assistant\|>|\[/INST\]",
                "fields": {"reasoning_content": _THINK, "content": {"content": "text"}},
            }
        ),
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}


def family_of(chat_template: str) -> ChatFamily | None:
    """Return the family whose marks a chat template contains."""
    for family in FAMILIES:
        if all(mark in chat_template for mark in family.marks):
            return family
    return None
