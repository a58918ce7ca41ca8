"""Finds the values that a field of a body may have, for errors that refuse other values."""

from __future__ import annotations

import functools
import re
from typing import Any

from msgspec import inspect


def allowed_values(body: Any, path: str) -> tuple[Any, ...]:
    """Return the values that the field at `path` may have; () if they are not a fixed set.

    Args:
        body: the type of the whole body.
        path: as msgspec writes it without `$`, such as "tools[0].type".
    """
    found = _described(body)
    for step in re.sub(r"\[[^\]]*\]", ".[]", path).lstrip(".").split("."):
        inner = list(_inner_types(found, step))
        if len(inner) != 1:
            # Several structs have a field of this name, or the path leads through an object without a type.
            return ()
        found = inner[0]
    return tuple(
        value for each in _members(found) if isinstance(each, inspect.LiteralType) for value in each.values
    )


@functools.cache
def _described(body: Any) -> inspect.Type:
    return inspect.type_info(body)


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _inner_types(kind: inspect.Type, step: str) -> list[inspect.Type]:
    """Return the types of a field; of the items of a list if `step` is "[]"."""
    if step == "[]":
        lists = (inspect.ListType, inspect.VarTupleType)
        return [each.item_type for each in _members(kind) if isinstance(each, lists)]
    structs = [each for each in _members(kind) if isinstance(each, inspect.StructType)]
    return [field.type for each in structs for field in each.fields if field.encode_name == step]
