"""Readers of the regions in which a model writes tool calls: each follows one shape and reports calls as they grow.

What turns out not to be a call is left as text: `unparsed` is then everything that the reader has taken and not
reported, with the marker that opened the region.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from router.chat.argument_types import argument_json, properties_of
from router.chat.json_pieces import BLANKS, CallObject, JsonValue
from router.chat.response_template import CALLS, AnswerRegion, Find, Shape

MAX_UNNAMED = 1 << 16  # characters of a call whose function is not known yet; beyond them it is text
MAX_WHOLE = 1 << 16  # characters of a region that is read only when it is complete
_SEPARATORS = BLANKS + ",;"


class Calls(Protocol):
    """Receives calls."""

    def open(self, name: str) -> None: ...

    def add(self, arguments: str) -> None: ...


class CallReader(ABC):
    """Reads one region."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.over = False  # the region has ended, with its marker or without one
        self.unparsed: str | None = None

    @property
    def in_string(self) -> bool:
        """True if the text so far ends inside a JSON string: a closing marker there is part of it."""
        return False

    @property
    def in_call(self) -> bool:
        """True if the text so far ends inside a call that has been reported."""
        return False

    @abstractmethod
    def take(self, text: str) -> int:
        """Read on. Return how many characters belong to the region: all of them unless it is `over`."""

    def close(self, marker: str | None) -> None:
        """End the region at its closing marker; None at the end of the answer."""
        self.over = True


class ObjectReader(CallReader):
    """Reads JSON objects with name and arguments, also in a list or separated by semicolons."""

    def __init__(self, calls: Calls, opener: str, closes: bool) -> None:
        """`closes`: the region has a closing marker, and what precedes it belongs to the region."""
        super().__init__(calls)
        self._closes = closes
        self._raw = [opener]  # since the last call that was reported
        self._raw_size = 0
        self._object: CallObject | None = None
        self._any = False
        self._ignoring = False
        self._listed = False

    @property
    def in_string(self) -> bool:
        return self._object is not None and self._object.in_string

    @property
    def in_call(self) -> bool:
        return self._object is not None and self._object.in_call

    def take(self, text: str) -> int:
        position = 0
        while position < len(text) and not self.over:
            if self._ignoring:
                return len(text)
            if self._object is None:
                position = self._between(text, position)
            else:
                position = self._read(self._object, text, position)
        return position

    @property
    def _reported(self) -> bool:
        return self._object is not None and self._object.named

    def _between(self, text: str, position: int) -> int:
        """Take one character between objects, or begin an object."""
        mark = text[position]
        if mark == "{":
            self._object = CallObject(self._open, self._calls.add)
            return position
        begins = mark == "[" and not self._any and not self._listed
        ends = mark == "]" and self._listed and self._any and not self._closes
        if not begins and not ends and mark not in _SEPARATORS:
            self._stop()
            return position
        self._listed = self._listed or begins
        self.over = ends
        self._hold(mark)
        return position + 1

    def _read(self, call: CallObject, text: str, position: int) -> int:
        end = call.advance(text, position)
        if not call.named:
            self._hold(text[position:end])
        if call.malformed or (call.done and not call.named):
            self._stop()
        elif call.done:
            self._object = None
            self._any = True
        return end

    def _open(self, name: str) -> None:
        self._raw, self._raw_size = [], 0
        self._calls.open(name)

    def _hold(self, piece: str) -> None:
        self._raw.append(piece)
        self._raw_size += len(piece)
        if self._raw_size > MAX_UNNAMED:
            self._stop()

    def _stop(self) -> None:
        """End the region or ignore its rest, because no call follows."""
        if self._any and self._closes:
            self._ignoring = True
        elif self._reported:
            self._ignoring, self.over = self._closes, not self._closes
        else:
            self.over = True
            self.unparsed = "".join(self._raw)

    def close(self, marker: str | None) -> None:
        if not self.over and not self._reported and not self._any:
            self.unparsed = "".join([*self._raw, marker or ""])
        if marker is not None and self._object is not None:
            self._object.close()
        super().close(marker)


class JsonReader(CallReader):
    """Reads the arguments, as JSON, of a function that the marker names."""

    def __init__(self, calls: Calls, opener: str, name: str, closes: bool) -> None:
        super().__init__(calls)
        self._name = name
        self._closes = closes
        self._raw = [opener]
        self._value: JsonValue | None = None

    @property
    def in_string(self) -> bool:
        return self._value is not None and self._value.in_string

    @property
    def in_call(self) -> bool:
        return self._value is not None and not self._value.done

    def take(self, text: str) -> int:
        position = 0
        if self._value is None:
            position = len(text) - len(text.lstrip(BLANKS))
            self._raw.append(text[:position])
            if position == len(text):
                return position
            if text[position] != "{":
                self.over = True
                self.unparsed = "".join(self._raw)
                return position
            self._value = JsonValue()
            self._calls.open(self._name)
        if not self._value.done:
            end = self._value.advance(text, position)
            self._calls.add(text[position:end])
            position = end
        self.over = self._value.done and not self._closes
        return position if self.over else len(text)

    def close(self, marker: str | None) -> None:
        if self._value is None and not self.over:
            self.unparsed = "".join([*self._raw, marker or ""])
        super().close(marker)


class TagReader(CallReader):
    """Reads arguments that have a tag each. Their values are text: the tool's schema says what they are in JSON."""

    def __init__(
        self, calls: Calls, name: str, find: Find, tag_end: str | None, schemas: Mapping[str, Any]
    ) -> None:
        """`find` yields the tags of a text, `tag_end` is the literal that ends each of them, if it is known."""
        super().__init__(calls)
        self._find = find
        self._tag_end = tag_end
        self._schemas = schemas
        self._held: list[str] = []
        self._tail = ""  # where the end of a tag may be divided between two pieces
        self._keys: set[str] = set()
        calls.open(name)

    @property
    def in_call(self) -> bool:
        return not self.over

    def take(self, text: str) -> int:
        self._held.append(text)
        if self._tag_end is not None:
            recent = self._tail + text
            if self._tag_end in recent:
                self._report()
                recent = "".join(self._held)
            self._tail = recent[1 - len(self._tag_end) :]
        return len(text)

    def close(self, marker: str | None) -> None:
        super().close(marker)
        if marker is not None:
            self._report()
            self._calls.add("}" if self._keys else "{}")

    def _report(self) -> None:
        """Report the arguments that are complete."""
        text = "".join(self._held)
        end = len(text)
        if self._tag_end is not None:
            # What precedes the end of a tag is read only once, and no tag is searched for without an end.
            end = text.rfind(self._tag_end) + len(self._tag_end) if self._tag_end in text else 0
        for match in self._find(text[:end]):
            key = match["key"]
            if key not in self._keys:
                value = argument_json(match["value"], self._schemas.get(key))
                self._calls.add(
                    f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
                )
                self._keys.add(key)
        self._held = [text[end:]]


class WholeReader(CallReader):
    """Leaves a complete region to the library."""

    def __init__(
        self, calls: Calls, opener: str, parse: Callable[[str], dict[str, Any]], closes: bool
    ) -> None:
        super().__init__(calls)
        self._parse = parse
        self._closes = closes
        self._raw = [opener]
        self._size = 0

    def take(self, text: str) -> int:
        self._raw.append(text)
        self._size += len(text)
        if self._size > MAX_WHOLE:
            self.over = True
            self.unparsed = "".join(self._raw)
        return len(text)

    def close(self, marker: str | None) -> None:
        super().close(marker)
        text = "".join([*self._raw, marker or ""])
        try:
            if marker is None and self._closes:
                raise ValueError("the region is cut off")
            found = [_name_and_arguments(each) for each in _flat(self._parse(text).get(CALLS))]
        except (ValueError, TypeError, KeyError, RecursionError):
            found = []
        if not found:
            self.unparsed = text
        for name, arguments in found:
            self._calls.open(name)
            self._calls.add(arguments)


def reader_of(
    region: AnswerRegion,
    match: Any,
    opener: str,
    calls: Calls,
    tools: list[dict[str, Any]],
    whole: Callable[[str, Sequence[dict[str, Any]]], dict[str, Any]],
) -> CallReader:
    """Return the reader for a region that `match` opens."""
    # a closing lookahead is the beginning of something else
    closes = region.close is not None and not region.close.ahead
    match region.shape:
        case Shape.OBJECTS:
            return ObjectReader(calls, opener, closes)
        case Shape.NAMED_JSON:
            return JsonReader(calls, opener, match["name"], closes)
        case Shape.NAMED_XML:
            schemas = properties_of(tools).get(match["name"], {})
            assert region.tags is not None
            return TagReader(calls, match["name"], region.tags, region.tag_end, schemas)
        case Shape.OTHER:
            return WholeReader(calls, opener, lambda text: whole(text, tools), closes)


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [] if value is None else [value]
    return [each for item in value for each in _flat(item)]


def _name_and_arguments(call: Any) -> tuple[str, str]:
    """Return the name and the arguments of a call. Raises KeyError or TypeError for what is not a call."""
    function = call.get("function", call)
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str):
        raise TypeError("a call needs a name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return name, arguments
