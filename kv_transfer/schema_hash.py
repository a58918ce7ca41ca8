"""Hashes message schemas: two processes with the same hash parse the same structs in the same way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec


def schema_hash(structs: Iterable[type[msgspec.Struct]]) -> int:
    """Return 64 bits over the name, tag, field names and field types of these structs and the structs in them."""
    text = ";".join(
        f"{struct.__name__}:{struct.__struct_config__.tag}:{field}"
        for struct in _with_fields(structs)
        for field in [f"{name}={struct.__annotations__[name]}" for name in struct.__struct_fields__] or [""]
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _with_fields(structs: Iterable[type[msgspec.Struct]]) -> Iterator[type[msgspec.Struct]]:
    for struct in structs:
        yield struct
        inner = [field.type for field in msgspec.structs.fields(struct)]
        yield from _with_fields(each for each in inner if _is_struct(each))


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
