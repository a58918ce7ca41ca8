"""Explains why a body is not JSON: the place, the name that precedes it, and what to send instead."""

from __future__ import annotations

import codecs
import re

import msgspec

from common.errors import InvalidRequest

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_FOUND = re.compile(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?")
# The name of a member. A name inside a text has escaped quotes, so it does not match.
_NAME = re.compile(rb'"([^"\\]{1,64})"\s*:')
_NAME_BYTES = 1024  # before the place, in which a name is looked for
# Escapes in texts: whole surrogate pairs, then halves, which are the group, then the others.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_ESCAPE_BYTES = 32  # around the place, in which half of a surrogate pair is looked for
_NOT_FINITE = re.compile(rb"NaN|nan|Infinity")
_PYTHON = re.compile(rb"None|True|False")
_FIRST_PRINTED = 0x20


def malformed(raw: bytes | bytearray, error: msgspec.DecodeError | UnicodeDecodeError) -> InvalidRequest:
    """Return the refusal of a body for which the decoder raised `error`."""
    if raw.startswith(_UTF_16):
        return InvalidRequest("the body is encoded in UTF-16; send JSON in UTF-8")
    if raw.startswith(codecs.BOM_UTF8):
        return InvalidRequest("the body begins with a byte order mark; send JSON in UTF-8 without one")
    if not raw.strip():
        return InvalidRequest("the body is empty; send a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return _refusal(raw, _first_wrong_byte(raw), "it is not encoded in UTF-8; encode it so")
    found = _FOUND.fullmatch(str(error))
    problem, place = (found[1], found[2]) if found is not None else (str(error), None)
    at = len(raw) if place is None else int(place)
    if place is None or "surrogate" in problem:
        for escape in _ESCAPE.finditer(raw, max(at - _ESCAPE_BYTES, 0), at + _ESCAPE_BYTES):
            if escape[1] is not None:
                half = escape[0].decode()
                return _refusal(raw, escape.start(), f"{half} is half of a character; send both halves")
    if place is None:
        return _refusal(raw, at, "it ends too early; send all of it")
    return _refusal(raw, at, _with_remedy(raw, at, problem))


def _with_remedy(raw: bytes | bytearray, at: int, problem: str) -> str:
    """Return the decoder's words for a problem, and what to send instead where the cause is known."""
    # The decoder reads three bytes more of a lower-case one, as it would of null, and names the place that follows.
    if problem == "invalid character" and any(
        place >= 0 and _NOT_FINITE.match(raw, place) for place in (at, at - 4)
    ):
        return "JSON has no NaN or Infinity; send a number, or leave the field out"
    if _PYTHON.match(raw, at):
        return "JSON has null, true and false; encode the body with a JSON library"
    if at < len(raw) and raw[at] < _FIRST_PRINTED:
        return (
            "control characters in texts are escaped in JSON, as in \\n; encode the body with a JSON library"
        )
    if problem == "trailing characters":
        return "something follows its JSON object; send one object"
    return f"{problem}; encode the body with a JSON library"


def _refusal(raw: bytes | bytearray, at: int, problem: str) -> InvalidRequest:
    names = _NAME.findall(raw, max(at - _NAME_BYTES, 0), at)
    after = f' after "{names[-1].decode(errors="replace")}"' if names else ""
    return InvalidRequest(f"the body is not valid JSON at byte {at}{after}: {problem}")


def _first_wrong_byte(raw: bytes | bytearray) -> int:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(raw)
