"""Decodes untrusted JSON into one typed struct: checks the nesting depth first, then the schema.

Independent of HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from common.errors import InvalidRequest

MAX_DEPTH = 64  # levels of nested arrays and objects
PIECE = 1 << 16  # bytes per step of the depth check
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NO_MARK = bytes(set(range(256)) - set(b'[]{}"'))
_QUOTE, _OPENS = b'"['
T = TypeVar("T")


def decode_json(raw: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a JSON body. Raises InvalidRequest, which names the field."""
    if not raw:
        raise InvalidRequest("the body is empty; send a JSON object")
    check_depth(raw)
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise invalid_body(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


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


def invalid_body(error: msgspec.MsgspecError) -> InvalidRequest:
    """Describe a body that violates the schema, with the name of the field."""
    text, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.search(r"required field `(\w+)`", text)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
    return InvalidRequest(
        f"{field}: {text}" if field else f"the body is not valid: {text}", param=field or None
    )
