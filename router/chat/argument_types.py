"""Types the arguments of formats that write every value as text, by the JSON schema of the tool's parameters."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

_TRUE_FALSE = {"true": True, "1": True, "false": False, "0": False}


def argument_json(raw: str, schema: Any) -> str:
    """Return a value as JSON text: the first of the schema's types that the text can be; otherwise a string."""
    for kind in _kinds(schema):
        text = _as_kind(raw.strip(), kind)
        if text is not None:
            return text
        if kind == "string":
            break
    return json.dumps(raw, ensure_ascii=False)


def properties_of(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Map the name of each tool to the schemas of its parameters."""
    found = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found


def _kinds(schema: Any) -> list[str]:
    """Return the types that a schema names, in order; null first, so that a nullable string can be null."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    kinds = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        kinds += [each for each in declared if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and isinstance(choice.get("type"), str):
                kinds.append(choice["type"])
    if schema.get("nullable") is True:
        kinds.append("null")
    return sorted(kinds, key=lambda kind: kind != "null")


def _as_kind(raw: str, kind: str) -> str | None:
    """Return the JSON text of `raw` as this type; None if it is not of this type."""
    if kind == "null":
        return "null" if raw in ("null", "None") else None
    if kind == "boolean":
        found = _TRUE_FALSE.get(raw.lower())
        return None if found is None else json.dumps(found)
    if kind in ("integer", "number"):
        return _number(raw, kind == "integer")
    if kind in ("object", "array"):
        try:
            decoded = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return None
        return raw if isinstance(decoded, dict if kind == "object" else list) else None
    return None


def _number(raw: str, whole: bool) -> str | None:
    try:
        value = float(raw)
    except ValueError:
        return None
    if not math.isfinite(value) or (whole and not value.is_integer()):
        return None
    digits = raw.removeprefix("-")
    if digits.isdecimal() and digits.isascii():
        return raw[: len(raw) - len(digits)] + (digits.lstrip("0") or "0")
    return str(int(value)) if whole else json.dumps(value)
