"""The form in which each family writes a call, so that a grammar can force it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text around calls; `{name}` is the function and `{key}` an argument.

    Attributes:
        begin, end: around the arguments of one call.
        between: between two calls.
        opening, closing: around all calls.
        trigger: the marker with which calls begin inside text; None if there is none.
        marker: what may precede calls where there is no trigger.
        lookalike: a regular expression of what begins like a call, where there is no trigger: at the beginning of the
            answer and after `marker`, such text is read as a call.
        argument: around the value of one argument; None if the arguments are one JSON object.
    """

    begin: str
    end: str
    between: str
    trigger: str | None
    opening: str = ""
    closing: str = ""
    argument: tuple[str, str] | None = None
    marker: str = ""
    lookalike: str = ""

    @property
    def told_apart(self) -> bool:
        """True if a grammar can tell calls from text."""
        return self.trigger is not None or bool(self.lookalike)


class CallSupport(msgspec.Struct, frozen=True, array_like=True):
    """Tells which uses of tool calls the router supports for one model."""

    read: bool  # calls are found in answers
    forced: bool  # an answer can be made to call a tool
    told_apart: bool  # the schema of a call can be enforced where the model chooses whether to call


_BLANKS = r"[\s\x1c-\x1f]*"  # what Python counts as blanks

OBJECT = CallFormat('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n", "<tool_call>")
CALL_FORMATS = {
    "qwen2_5": OBJECT,
    "qwen3": OBJECT,
    "qwen3_5": CallFormat(
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        "\n",
        "<tool_call>",
        argument=("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    "glm4_5": CallFormat(
        "<tool_call>{name}\n",
        "</tool_call>",
        "\n",
        "<tool_call>",
        argument=("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "llama3": CallFormat(
        '{"name": "{name}", "parameters": ',
        "}",
        "; ",
        None,
        marker="<|python_tag|>",
        lookalike=rf'{_BLANKS}\{{{_BLANKS}("type"{_BLANKS}:{_BLANKS}"function"{_BLANKS},{_BLANKS})?"name"{_BLANKS}:',
    ),
    "mistral_v3": CallFormat(
        '{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS]", opening="[TOOL_CALLS] [", closing="]"
    ),
    "mistral_v11": CallFormat("[TOOL_CALLS]{name}[ARGS]", "", "", "[TOOL_CALLS]"),
}
