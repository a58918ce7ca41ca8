"""Finds out in which form a chat template takes the tool calls of earlier messages.

Some templates print calls only if the message's content is null, some join the arguments as text, some print a text
or calls but not both. One that is given another form prints nothing, or a Python dictionary. So each template
is probed once with marked calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

_Message = dict[str, Any]
# whether a conversation is printed with all the marks and without the pattern
Prints = Callable[[Sequence[_Message], Sequence[str], re.Pattern[str] | None], bool]

ASSISTANT, TOOL = "assistant", "tool"
_NAMES, _VALUES = ("qzprobefa", "qzprobefb"), ("qzprobeva", "qzprobevb")
_IDS = ("qzprobeia", "qzprobeib")  # nine letters, which is all that Mistral's templates take
_TEXT, _RESULT = "qzprobetext", "qzproberesult"
# Matches arguments that were printed as Python writes a dictionary, or quoted as JSON twice.
_WRONG_ARGUMENTS = re.compile(r"""'qzprobekey'\s*:|\\+"qzprobekey""", re.IGNORECASE)


def probe_tool() -> dict[str, Any]:
    """Return a tool for probing templates that print calls only to requests with tools."""
    parameters = {
        "type": "object",
        "properties": {"qzprobekey": {"type": "string", "description": "x"}},
        "required": ["qzprobekey"],
    }
    return {
        "type": "function",
        "function": {"name": _NAMES[0], "description": "x", "parameters": parameters},
    }


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template prints calls completely.

    Attributes:
        null_content: a message with calls and without text has the content null instead of an empty one.
        text_arguments: arguments are JSON text instead of objects.
        named_results: messages of tools have the name of the function.
        text_apart: the text of a message with calls is a message of its own.
        calls_apart: each call is a message of its own.
    """

    null_content: bool = False
    text_arguments: bool = False
    named_results: bool = False
    text_apart: bool = False
    calls_apart: bool = False

    def messages(self, message: _Message, has_text: bool) -> list[_Message]:
        """Return what stands for a message with calls, whose arguments are objects."""
        calls = [self._call(call) for call in message["tool_calls"]]
        groups = [[call] for call in calls] if self.calls_apart else [calls]
        empty = None if self.null_content else ""
        first = {**message, "tool_calls": groups[0]}
        if not has_text:
            first["content"] = None if self.null_content else message["content"]
        found = [first]
        if has_text and self.text_apart:
            del first["tool_calls"]
            found.append({"role": ASSISTANT, "content": empty, "tool_calls": groups[0]})
        return found + [{"role": ASSISTANT, "content": empty, "tool_calls": group} for group in groups[1:]]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        if not self.text_arguments:
            return call
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}


def find_call_form(prints: Prints, question: _Message) -> CallForm | None:
    """Return the form in which a template prints calls, or None if it prints none. `question` is a user's message."""
    # With results, as in conversations; with named ones, which Hermes demands; without, if the template has no tools.
    for results, named in ((True, False), (True, True), (False, False)):
        for text_arguments, null_content in product((False, True), (False, True)):
            form = CallForm(null_content, text_arguments, named)
            if _prints(prints, question, form, 1, "", results):
                return _completed(prints, question, form, results)
    return None


def _completed(prints: Prints, question: _Message, form: CallForm, results: bool) -> CallForm:
    """Find out whether several calls, and a text beside a call, are printed in one message or only apart."""
    # Some templates demand alternating roles, which messages apart break once an answer follows.
    rest = [{"role": ASSISTANT, "content": question["content"]}, question]
    for calls, text, field in ((2, "", "calls_apart"), (1, _TEXT, "text_apart")):
        if not _prints(prints, question, form, calls, text, results):
            apart = replace(form, **{field: True})
            form = apart if _prints(prints, question, apart, calls, text, results, rest) else form
    return form


def _prints(
    prints: Prints,
    question: _Message,
    form: CallForm,
    calls: int,
    text: str,
    results: bool,
    rest: Sequence[_Message] = (),
) -> bool:
    answers = [result_message(index, f"{_RESULT}{index}", form) for index in range(calls if results else 0)]
    marks = (*_NAMES[:calls], *_VALUES[:calls], text, *(each["content"] for each in answers))
    conversation = [question, *call_messages(form, calls, text), *answers, *rest]
    return prints(conversation, marks, _WRONG_ARGUMENTS)


def call_messages(form: CallForm, calls: int = 1, text: str = "") -> list[_Message]:
    """Return messages with marked calls."""
    listed = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": {"qzprobekey": value}}}
        for id, name, value in zip(_IDS[:calls], _NAMES, _VALUES)
    ]
    message = {"role": ASSISTANT, "content": text, "tool_calls": listed}
    return form.messages(message, bool(text))


def result_message(index: int, content: Any, form: CallForm) -> _Message:
    """Return the message of a tool that answers a marked call."""
    message = {"role": TOOL, "content": content, "tool_call_id": _IDS[index]}
    return message | {"name": _NAMES[index]} if form.named_results else message
