"""Values of a model's JSON files, checked: errors name the file, the key and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError


def section(raw: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """An object. Raises ModelError."""
    value = raw.get(key)
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {key} must be an object, found {type(value).__name__}")
    return value


def positive(raw: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """An integer above 0; null and a missing key are the default. Raises ModelError."""
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} must be a positive integer, found {value!r}")
    return value


def token_id(raw: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    """Of the first of `keys` that is there. Raises ModelError."""
    value = next((raw[key] for key in keys if raw.get(key) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{where}: {keys[0]} must be a token id, found {value!r}")
    return value
