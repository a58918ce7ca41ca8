"""Pieces of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json

ANY_TEXT = "/(?s:.*)/"


def quoted(text: str) -> str:
    """Return a literal of Lark, whose strings have the escapes of JSON; "" for the empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""
