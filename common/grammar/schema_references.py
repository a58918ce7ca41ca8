"""Finds what a reference within a schema points to."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def pointed(root: Any, reference: str) -> Any:
    """Return the part of `root` at a JSON pointer, as "#/$defs/name". None if nothing is there, or for no pointer."""
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found
