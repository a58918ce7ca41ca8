"""Reads and checks values of a model's JSON files: errors name the file, the key and the value found.

The files are untrusted: every number has an upper bound, so nothing that is sized by it can be absurdly large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from common.errors import ModelError

MAX_INT = (1 << 31) - 1  # device code counts in int32
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 18  # values per token in one tensor
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 27
MAX_HEADS = 4096
Raw = Mapping[str, Any]  # an object of such a file, not checked yet


def section(raw: Raw, key: str, where: str) -> dict[str, Any]:
    """Return an object. Raises ModelError."""
    value = raw.get(key)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {key} must be an object, found {type(value).__name__}")
    return value


def optional_section(raw: Raw, key: str, where: str) -> dict[str, Any]:
    """Return an object, empty if the key is missing or null. Raises ModelError."""
    return {} if raw.get(key) is None else section(raw, key, where)


def positive(raw: Raw, key: str, where: str, default: int | None = None, most: int = MAX_INT) -> int:
    """Return an integer from 1 to `most`; the default if the key is missing or null. Raises ModelError."""
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, found {shown(value)}")
    if value > most:
        raise ModelError(f"{where}: {key} {shown(value)} is more than the {most} that are supported")
    return value


def number(raw: Raw, key: str, where: str, default: float | None = None, most: float = 1e12) -> float:
    """Return a finite number above 0 and at most `most`; the default if missing or null. Raises ModelError."""
    found = raw.get(key)
    value: Any = default if found is None else found
    if type(value) not in (int, float) or not 0 < value <= most:  # NaN fails this too
        raise ModelError(f"{where}: {key} must be a positive number up to {most:g}, found {shown(value)}")
    return float(value)


def flag(raw: Raw, key: str, where: str, default: bool = False) -> bool:
    """Return true or false; the default if missing or null. Raises ModelError."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"{where}: {key} must be true or false, found {shown(value)}")
    return value


def word(raw: Raw, key: str, where: str, default: str) -> str:
    """Return a string; the default if missing or null. Raises ModelError."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ModelError(f"{where}: {key} must be a string, found {shown(value)}")
    return value


def architecture_of(raw: Raw) -> str | None:
    """Return the first name in `architectures`, if there is one."""
    found = raw.get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    return name if isinstance(name, str) else None


def token_id(raw: Raw, keys: tuple[str, ...], where: str) -> int:
    """Return the value of the first of `keys` that exists. Raises ModelError."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if type(value) is not int or not 0 <= value <= MAX_INT:
        raise ModelError(f"{where}: {keys[0]} must be a token id, found {shown(value)}")
    return value


def shown(value: object) -> str:
    """Return a value as an error quotes it, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def is_finite(value: object) -> bool:
    """Return whether it is a JSON number that a float can represent."""
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) < 1 << 1000
