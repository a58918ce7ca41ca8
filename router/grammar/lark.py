"""Grammars in llguidance's dialect of Lark, and their writer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec

ANY_TEXT = "/(?s:.*)/"
BLANKS = r"/[ \n]{0,4}/"


class Lark(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A grammar in llguidance's dialect of Lark."""

    text: str
    # JSON texts of schemas that the grammar refers to as @name
    schemas: dict[str, str] = {}
    # whether the JSON of these schemas has one layout, without whitespace
    compact: bool = False


class LarkWriter:
    """Collects the rules and schemas of one grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """`special`: ids of the special tokens in literals, which ordinary text cannot match."""
        self._special = special
        self.special_tokens = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self.rules: list[str] = []
        self.schemas: dict[str, str] = {}

    def finished(self, start: str) -> Lark:
        """Return the grammar whose texts match `start`."""
        return Lark("\n".join((f"start: {start}", *self.rules)), self.schemas)

    def literal(self, text: str) -> str:
        """Return what matches exactly this text; special tokens in it by their ids."""
        parts, start = list[str](), 0
        for match in self.special_tokens.finditer(text):
            parts += [quoted(text[start : match.start()]), f"<[{self._special[match[0]]}]>"]
            start = match.end()
        return sequence(*parts, quoted(text[start:]))

    def until(self, end: str, rule: str) -> str:
        """Return what matches any text up to and including `end`; `rule` is the name of a rule that this may need."""
        special = self.special_tokens.search(end)
        if special is None:
            self.rules.append(f"{rule}[suffix={quoted(end)}]: {ANY_TEXT}")
            return rule
        if special.start() == 0:
            return sequence(ANY_TEXT, self.literal(end))
        # A suffix would end the text where the part before the special token first occurs.
        name = rule.upper()
        self.rules.append(f"{name}: {ANY_TEXT} {quoted(end[: special.start()])}")
        return sequence(name, self.literal(end[special.start() :]))

    def reasoning(self, end: str, begin: str | None) -> str:
        """Return what matches reasoning up to its marker `end`, and the blanks that models write after it.

        `begin`: the marker with which it begins, if there may be none; None: the prompt has opened it.
        """
        inside = sequence(self.until(end, "reasoning"), BLANKS)
        if begin is None:
            return inside
        # Blanks come before either, so that a model which begins with one is not forced to reason.
        return f"{BLANKS} ({sequence(self.literal(begin), inside)})?"


def quoted(text: str) -> str:
    """Return a literal of Lark, whose strings have the escapes of JSON; "" for the empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def sequence(*parts: str) -> str:
    """Return what matches these parts, one after the other; empty ones match nothing and are left out."""
    return " ".join(filter(None, parts))
