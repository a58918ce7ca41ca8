"""Decodes untrusted JSON into one typed struct: checks the nesting depth first, then the schema.

It does not depend on HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest
from router.requests.allowed_values import allowed_values
from router.requests.malformed_json import malformed

MAX_DEPTH = 64  # levels of nested arrays and objects
MAX_EXACT = 1 << 53  # integers below it are exact as floats
MAX_ITEMS = 128  # of a list in which whole numbers are looked for
MAX_COMMAS = 64 * MAX_ITEMS  # in such a list, whose items may be objects
PIECE = 1 << 16  # bytes per step of the depth check
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTE, _OPENS = b'"['
# A number with a fraction or an exponent.
_NOT_PLAIN = re.compile(rb"-?\d{1,16}(?:\.\d{1,16}|(?=[eE]))(?:[eE][+-]?\d\d?)?")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
T = TypeVar("T")


def decode_json(raw: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a JSON body. Raises InvalidRequest, which names the field."""
    if not raw:
        raise InvalidRequest("the body is empty; send a JSON object")
    check_depth(raw)
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            whole = _with_whole_numbers(raw) if "got `float`" in str(error) else None
            if whole is None:
                raise
            return decoder.decode(whole)
    except msgspec.ValidationError as error:
        raise invalid_body(error, decoder.type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed(raw, error) from error
    except RecursionError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def _with_whole_numbers(raw: bytes | bytearray) -> bytes | None:
    """Return a body with integers where its fields, or those of objects in it, have numbers like 16.0 or 1e+05.

    Some languages print integers so, and other servers take them. None if there are none.
    """
    changed = _whole_numbers(raw, levels=2)
    return None if changed is None else msgspec.json.encode(changed)


def _whole_numbers(raw: bytes | bytearray | msgspec.Raw, levels: int) -> dict[str, Any] | None:
    """Return an object with such integers, down to this many levels of objects; None if it has none."""
    try:
        fields: dict[str, Any] = _fields.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    found = {name: _whole(value, levels) for name, value in fields.items()}
    changed = {name: value for name, value in found.items() if value is not None}
    return fields | changed if changed else None


def _whole(value: msgspec.Raw, levels: int) -> Any:
    """Return the value of a field, or of an item in a short list, with such integers; None if it has none."""
    number = _NOT_PLAIN.fullmatch(value)
    if number is not None:
        exact = float(number[0])
        return int(exact) if exact.is_integer() and abs(exact) < MAX_EXACT else None
    if bytes(memoryview(value)[:1]) != b"[":
        return _whole_numbers(value, levels - 1) if levels > 1 else None
    if bytes(memoryview(value)).count(b",") > MAX_COMMAS:
        return None
    items = _items.decode(value)
    found = [_whole(item, levels) for item in items] if len(items) <= MAX_ITEMS else []
    if all(each is None for each in found):
        return None
    return [item if each is None else each for item, each in zip(items, found, strict=True)]


def whole_ids(ids: list[Any]) -> list[Any]:
    """Return a list whose items have any type with integers where it has numbers like 16.0, as `decode_json` does."""
    if len(ids) > MAX_ITEMS or float not in map(type, ids):
        return ids
    return [
        int(each) if type(each) is float and each.is_integer() and abs(each) < MAX_EXACT else each
        for each in ids
    ]


def check_depth(raw: bytes | bytearray) -> None:
    """Raise InvalidRequest if JSON nests deeper than MAX_DEPTH. Invalid JSON may pass: the decoder refuses it."""
    most = MAX_DEPTH // 2
    if raw.count(b"[") <= most and raw.count(b"{") <= most:
        # Too few to nest too deep.
        return
    depth, inside = 0, False
    for marks in _marks(raw):
        for mark in marks:
            if mark == _QUOTE:
                inside = not inside
            elif not inside:
                depth += 1 if mark == _OPENS else -1
                if depth > MAX_DEPTH:
                    raise InvalidRequest(
                        f"the body nests arrays and objects more than {MAX_DEPTH} levels deep"
                    )


def _marks(raw: bytes | bytearray) -> Iterator[bytes]:
    """Yield quotes and brackets piece by piece, in one pass over the body."""
    start = 0
    while start < len(raw):
        end = start + PIECE
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character belongs to this piece
            piece, end = raw[start : end + 1], end + 1
        start = end
        marks = piece.replace(rb"\\", b"").replace(rb"\"", b"").translate(_ONE_KIND, _NO_MARK)
        # Two adjacent quotes cancel each other, whatever they enclosed.
        yield bytes(marks.replace(b'""', b""))


def invalid_body(error: msgspec.MsgspecError, body: Any) -> InvalidRequest:
    """Describe a body that violates the schema `body`, with the name of the field."""
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    named = re.search(r"(required|unknown) field `([^`]*)`", text)
    if named:
        field = f"{field}.{named[2]}" if field else named[2]
        problem = (
            "is missing"
            if named[1] == "required"
            else "is not supported by this version of tandem; leave it out"
        )
        return InvalidRequest(f"{field} {problem}", param=field)
    if text.startswith("Invalid enum value") and (allowed := allowed_values(body, field)):
        text = f"{text}; send {' or '.join(map(str, allowed))}"
    return InvalidRequest(
        f"{field}: {text}" if field else f"the body is not valid: {text}", param=field or None
    )
