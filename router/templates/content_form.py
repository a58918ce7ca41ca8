"""Finds out in which form a chat template takes message content: one text, a list of parts, or either.

A template that is given the wrong form rarely fails: it prints a Python list, or finds no parts in a text and prints
nothing. So each template is probed once: marked messages of each role are rendered to see which forms appear whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Content = str | list[dict[str, str]]
_Message = dict[str, Any]
Render = Callable[[Sequence[_Message]], str]

USER, SYSTEM, DEVELOPER = "user", "system", "developer"
# Conversations in which a role is probed: some templates demand what others refuse ("roles must alternate").
_SURROUNDINGS: dict[str, tuple[tuple[Sequence[str], Sequence[str]], ...]] = {
    USER: (((), ()), ((SYSTEM,), ()), ((), ("assistant",))),
    SYSTEM: (((), (USER,)),),
    DEVELOPER: (((), (USER,)),),
    "assistant": (((USER,), (USER,)), ((USER,), ())),
    "tool": (((USER, "assistant"), ()), ((), (USER,))),
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
    """The form of each role, found by rendering short conversations."""

    def __init__(self, render: Render) -> None:
        """`render` may raise anything, because a template can."""
        self._render = render
        as_text = RoleForm(True, Parts.NONE)
        self._user = self._probe(USER, as_text) or as_text
        found = {role: self._probe(role, self._user) for role in _SURROUNDINGS if role != USER}
        self._others = {role: form or self._user for role, form in found.items()}
        self._developer = DEVELOPER if found[DEVELOPER] else SYSTEM

    def of(self, role: str) -> RoleForm:
        """Return the form of a role. Unknown roles, and roles whose content is never printed, take the user's form."""
        return self._others.get(role, self._user)

    def printed_role(self, role: str) -> str:
        """Return the role under which to render a message: OpenAI's developer is system to most templates."""
        return self._developer if role == DEVELOPER else role

    def _probe(self, role: str, others: RoleForm) -> RoleForm | None:
        """Return None if no conversation prints the role's content. `others` is the form of all other messages."""
        for before, after in _SURROUNDINGS[role]:
            found = self._probe_between(
                role,
                [_message(each, others.of_text("x")) for each in before],
                [_message(each, others.of_text("x")) for each in after],
            )
            if found.text or found.parts:
                return found
        return None

    def _probe_between(self, role: str, before: list[_Message], after: list[_Message]) -> RoleForm:
        def prints(content: Content, marks: Sequence[str]) -> bool:
            return self._prints([*before, _message(role, content), *after], marks)

        parts = [text_part(mark) for mark in _MARKS]
        text = prints(_MARKS[0], _MARKS[:1])
        if prints(parts, _MARKS):
            return RoleForm(text, Parts.SEVERAL)
        return RoleForm(text, Parts.ONE if prints(parts[:1], _MARKS[:1]) else Parts.NONE)

    def _prints(self, messages: Sequence[_Message], marks: Sequence[str]) -> bool:
        try:
            text = self._render(messages)
        except MemoryError:
            # This says nothing about the template: the next request probes again.
            raise
        except Exception:
            # A refusal or an error of the template: it does not take this form.
            return False
        return all(mark in text.lower() for mark in marks) and not _PRINTED_LIST.search(text)


def _message(role: str, content: Content) -> _Message:
    return {"role": role, "content": content}
