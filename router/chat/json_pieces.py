"""Reads JSON that arrives in pieces: finds where values end, and takes tool calls out of objects.

Only brackets and strings are followed. Models write JSON with mistakes, and what they wrote is passed on unchanged, so
nothing here raises. Nesting is a counter: a megabyte of open brackets costs no memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

import msgspec

BLANKS = " \t\r\n"
NO_VALUE = ",:}]"  # characters with which no value begins
ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r'[\s,:"{}\[\]]')


class JsonValue:
    """Finds the end of one value."""

    def __init__(self) -> None:
        self.in_string = False
        self.done = False
        self.first = ""  # first character of the value
        self._escaped = False
        self._depth = 0

    def advance(self, text: str, start: int) -> int:
        """Read on at `start`, which is not blank at first. Return the end of what belongs to the value."""
        position = start
        if not self.first:
            self.first = text[start]
            if self.first in '"{[':
                self.in_string = self.first == '"'
                self._depth = int(self.first != '"')
                position += 1
            elif self.first in NO_VALUE:
                self.done = True
        while position < len(text) and not self.done:
            position = self._step(text, position)
        return position

    def _step(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        if self.in_string:
            found = _IN_STRING.search(text, position)
            if found is not None:
                self._escaped = found[0] == "\\"
                self.in_string = self._escaped
                self.done = not self.in_string and not self._depth
        elif not self._depth:
            found = _SCALAR_END.search(text, position)
            if found is not None:
                self.done = True
                return found.start()
        else:
            found = _STRUCTURE.search(text, position)
            if found is not None:
                self.in_string = found[0] == '"'
                self._depth += {"{": 1, "[": 1, '"': 0}.get(found[0], -1)
                self.done = not self._depth
        return len(text) if found is None else found.end()


class _Expect(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    NOTHING = auto()


class CallObject:
    """Reads one object with `name` and `arguments` (or `parameters`).

    `on_name` is called once. `on_arguments` is called with the JSON text of the arguments in pieces, after the name
    even if the object has them in the other order. Arguments that are a string are taken as JSON text.
    """

    def __init__(self, on_name: Callable[[str], None], on_arguments: Callable[[str], None]) -> None:
        self._on_name = on_name
        self._on_arguments = on_arguments
        self._expect = _Expect.OPEN
        self._value: JsonValue | None = None
        self._is_key = False
        self._key = ""
        self._text: list[str] = []  # the key or value being read, where it is needed whole
        self._early: list[str] = []  # arguments that precede the name
        self._has_arguments = False
        self.named = False
        self.malformed = False

    @property
    def done(self) -> bool:
        return self._expect is _Expect.NOTHING

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    @property
    def in_call(self) -> bool:
        """True if the text so far has the name and not all of the arguments."""
        return self.named and not self.done and (self._value is not None or not self._has_arguments)

    def advance(self, text: str, start: int) -> int:
        """Read on. Return the end of what belongs to the object, or where it is `malformed`."""
        position = start
        while position < len(text) and not self.done and not self.malformed:
            if self._value is not None:
                position = self._read_value(self._value, text, position)
            elif text[position] in BLANKS:
                position += 1
            else:
                position += self._mark(text[position])
        return position

    def _mark(self, mark: str) -> int:
        """Take one character of structure. Return the number of characters used."""
        expect = self._expect
        if expect is _Expect.VALUE or (expect is _Expect.KEY and mark == '"'):
            self._value, self._is_key, self._text = JsonValue(), expect is _Expect.KEY, []
            return 0
        following = {
            (_Expect.OPEN, "{"): _Expect.KEY,
            (_Expect.COLON, ":"): _Expect.VALUE,
            (_Expect.COMMA, ","): _Expect.KEY,
            (_Expect.COMMA, "}"): _Expect.NOTHING,
            (_Expect.KEY, "}"): _Expect.NOTHING,
        }.get((expect, mark))
        if following is None:
            self.malformed = True
            return 0
        self._expect = following
        if following is _Expect.NOTHING:
            self.close()
        return 1

    def close(self) -> None:
        """End the object: without arguments they are empty."""
        if self.named and not self._has_arguments:
            self._on_arguments("{}")

    def _read_value(self, value: JsonValue, text: str, position: int) -> int:
        end = value.advance(text, position)
        piece = text[position:end]
        streamed = not self._is_key and self._key in ARGUMENT_KEYS and value.first in ("{", "[")
        if streamed:
            self._add_arguments(piece)
        elif self._is_key or self._key == "name" or self._key in ARGUMENT_KEYS:
            self._text.append(piece)
        if value.done:
            self._value = None
            if value.first in NO_VALUE:
                self.malformed = True
            else:
                self._ended(streamed)
        return end

    def _ended(self, streamed: bool) -> None:
        text = "".join(self._text)
        if self._is_key:
            self._key, self._expect = _string(text), _Expect.COLON
            return
        self._expect = _Expect.COMMA
        if self._key == "name" and not self.named:
            if not text.startswith('"'):
                self.malformed = True
                return
            self.named = True
            self._on_name(_string(text))
            for piece in self._early:
                self._on_arguments(piece)
            self._early = []
        elif self._key in ARGUMENT_KEYS and not streamed:
            self._add_arguments("{}" if text == "null" else _string(text) if text[:1] == '"' else text)

    def _add_arguments(self, piece: str) -> None:
        self._has_arguments = True
        if self.named:
            self._on_arguments(piece)
        else:
            self._early.append(piece)


def _string(text: str) -> str:
    """Return the value of a JSON string; the text between its quotes if it is not valid."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return text[1:-1]
