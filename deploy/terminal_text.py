"""Makes text of models and servers safe to print: they must not control the terminal that shows it."""

from __future__ import annotations

import unicodedata

_KEPT = {"\n", "\t"}
# They reorder what surrounds them, so that a line reads differently from its text.
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_CONTROL_PICTURES = 0x2400
_DELETE, _SYMBOL_FOR_DELETE = "\x7f", "\u2421"
_REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """Return `text` with a visible symbol in place of each control character and each bidirectional override.

    Line feeds and tabs stay. Without its first character an escape sequence is plain text, so the parts of a stream
    can be made printable one by one.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in _KEPT:
        return character
    if character in _BIDIRECTIONAL:
        return _REPLACEMENT
    if character == _DELETE:
        return _SYMBOL_FOR_DELETE
    if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs"):
        return chr(_CONTROL_PICTURES + ord(character)) if ord(character) < 0x20 else _REPLACEMENT
    return character
