"""Finds out in which form a chat template takes messages: their content as one text, a list of parts, or either.

A template that is given the wrong form rarely fails: it prints a Python list, or finds no parts in a text and prints
nothing. So each template is probed once: marked messages of each role are rendered to see which forms appear whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from router.templates.call_form import ASSISTANT, TOOL, call_messages, find_call_form, result_message

Content = str | list[dict[str, str]]
_Message = dict[str, Any]
Render = Callable[[Sequence[_Message]], str]

USER, SYSTEM, DEVELOPER = "user", "system", "developer"
# Conversations in which a role is probed: some templates demand what others refuse ("roles must alternate").
_SURROUNDINGS: dict[str, tuple[tuple[Sequence[str], Sequence[str]], ...]] = {
    USER: (((), ()), ((SYSTEM,), ()), ((), (ASSISTANT,))),
    SYSTEM: (((), (USER,)),),
    DEVELOPER: (((), (USER,)),),
    ASSISTANT: (((USER,), (USER,)), ((USER,), ())),
    TOOL: (((USER, ASSISTANT), ()), ((), (USER,))),
}
_MARKS = ("qzprobexa", "qzprobexb")
# Matches a list that was printed itself, by Python or as JSON: [{'type': 'text', 'text': 'qzprobexa'}]
_PRINTED_LIST = re.compile(rf"""["']text["']\s*:\s*["']({"|".join(_MARKS)})""", re.IGNORECASE)


class Parts(IntEnum):
    """The number of text parts of one message that a template prints."""

    NONE = 0
    ONE = 1
    SEVERAL = 2


@dataclass(frozen=True, slots=True)
class RoleForm:
    """The forms of content that a template prints completely for messages of one role."""

    text: bool
    parts: Parts

    def of_text(self, text: str) -> Content:
        """Return content that the client sent as a string, in the form that the template prints."""
        return text if self.text or self.parts is Parts.NONE else [text_part(text)]

    def of_parts(self, texts: Sequence[str]) -> Content:
        """Return text parts unchanged if the template prints all of them, otherwise joined by newlines."""
        if texts and (self.parts is Parts.SEVERAL or len(texts) == self.parts):
            return [text_part(text) for text in texts]
        return self.of_text("\n".join(texts))


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class ContentForms:
    """The forms of a template, found by rendering short conversations.

    Attributes:
        calls: the form of tool calls, None if the template prints none.
        single_system: the template prints only one message of the system, at the beginning.
    """

    def __init__(self, render: Render) -> None:
        """`render` may raise anything, because a template can."""
        self._render = render
        as_text = RoleForm(True, Parts.NONE)
        self._found = {USER: self._probe(USER, as_text)}
        self._user = self._found[USER] or as_text
        question = _message(USER, self._user.of_text("x"))
        self.calls = find_call_form(self._prints, question)
        self._found |= {
            role: self._probe(role, self._user) for role in _SURROUNDINGS if role not in (USER, TOOL)
        }
        self._found[TOOL] = self._probe_results(question) or self._probe(TOOL, self._user)
        self._developer = DEVELOPER if self._found[DEVELOPER] else SYSTEM
        self.single_system = self.prints(SYSTEM) and not self._prints_systems(question)

    def of(self, role: str) -> RoleForm:
        """Return the form of a role. Unknown roles, and roles whose content is never printed, take the user's form."""
        return self._found.get(role) or self._user

    def prints(self, role: str) -> bool:
        """Return whether prompts show the content of a role; True if they show none at all, not even that of users."""
        return role not in self._found or self._found[role] is not None or self._found[USER] is None

    @property
    def prints_calls(self) -> bool:
        """True if tool calls appear in prompts, or not even messages of users do."""
        return self.calls is not None or self._found[USER] is None

    def printed_role(self, role: str) -> str:
        """Return the role under which to render a message: OpenAI's developer is system to most templates."""
        return self._developer if role == DEVELOPER else role

    def _probe(self, role: str, others: RoleForm) -> RoleForm | None:
        """Return None if no conversation prints the role's content. `others` is the form of all other messages."""
        for before, after in _SURROUNDINGS[role]:
            found = self._probe_between(
                lambda content: _message(role, content),
                [_message(each, others.of_text("x")) for each in before],
                [_message(each, others.of_text("x")) for each in after],
            )
            if found is not None:
                return found
        return None

    def _probe_results(self, question: _Message) -> RoleForm | None:
        """Probe the role tool in the only place that some templates know: after a call."""
        calls = self.calls
        if calls is None:
            return None
        return self._probe_between(
            lambda content: result_message(0, content, calls), [question, *call_messages(calls)], []
        )

    def _probe_between(
        self, message: Callable[[Content], _Message], before: list[_Message], after: list[_Message]
    ) -> RoleForm | None:
        def prints(content: Content, marks: Sequence[str]) -> bool:
            return self._prints([*before, message(content), *after], marks)

        parts = [text_part(mark) for mark in _MARKS]
        text = prints(_MARKS[0], _MARKS[:1])
        if prints(parts, _MARKS):
            return RoleForm(text, Parts.SEVERAL)
        one = prints(parts[:1], _MARKS[:1])
        return RoleForm(text, Parts.ONE if one else Parts.NONE) if text or one else None

    def _prints_systems(self, question: _Message) -> bool:
        first, second = (_message(SYSTEM, self.of(SYSTEM).of_text(mark)) for mark in _MARKS)
        answer = _message(ASSISTANT, self.of(ASSISTANT).of_text("x"))
        places = ([first, second, question], [first, question, answer, second, question])
        return all(self._prints(each, _MARKS) for each in places)

    def _prints(
        self, messages: Sequence[_Message], marks: Sequence[str], wrong: re.Pattern[str] | None = None
    ) -> bool:
        try:
            text = self._render(messages)
        except MemoryError:
            # This says nothing about the template: the next request probes again.
            raise
        except Exception:
            # A refusal or an error of the template: it does not take this form.
            return False
        return all(mark in text.lower() for mark in marks) and not (wrong or _PRINTED_LIST).search(text)


def _message(role: str, content: Content) -> _Message:
    return {"role": role, "content": content}
