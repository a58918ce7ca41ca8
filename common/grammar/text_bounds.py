"""Bounds of what constrains one text of a value: at the value itself, and in each of its children."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ITEM_SCHEMAS = ("items", "additionalItems")
ITEM_LISTS = ("prefixItems", "items")
LENGTHS = ("minLength", "maxLength")


class Met(NamedTuple):
    """Upper bounds of what constrains one text."""

    patterns: int = 0  # patterns, formats and bounds of its length
    literals: int = 0  # values of an enum that are compared with them


NOTHING = Met()


class Bounds(NamedTuple):
    """Upper bounds for the texts of a value that a schema accepts.

    Each child stands for all texts inside it. A property may have the bound of its name or `others`.
    """

    # the value itself
    here: Met = NOTHING
    # properties with a name that something constrains
    named: Mapping[str, Met] = {}
    # properties that additionalProperties or patternProperties may reach
    others: Met = NOTHING
    # every item of an array
    items: Met = NOTHING
    # any text, wherever in the value it is
    anywhere: Met = NOTHING

    def child(self, name: str) -> Met:
        """Return the bound of a property, which is at most that of its name or `others`."""
        return either(self.named.get(name, NOTHING), self.others)


def either(one: Met, other: Met) -> Met:
    """Return the bounds of a text that meets one of two."""
    if other == NOTHING:
        return one
    return Met(max(one.patterns, other.patterns), max(one.literals, other.literals))


def largest(found: Iterable[Met]) -> Met:
    """Return the bounds of a text that meets one of those found."""
    patterns = literals = 0
    for each in found:
        patterns = max(patterns, each.patterns)
        literals = max(literals, each.literals)
    return Met(patterns, literals)


def total(found: Iterable[Met]) -> Met:
    """Return the bounds of a text that meets all of those found."""
    patterns = literals = 0
    for each in found:
        patterns += each.patterns
        literals = max(literals, each.literals)
    return Met(patterns, literals)


def alternatives(options: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a value that matches one of the options."""
    if len(options) == 1:
        return options[0]
    named = dict[str, Met]()
    for option in options:
        for name, met in option.named.items():
            named[name] = either(named.get(name, NOTHING), met)
    return Bounds(
        largest(option.here for option in options),
        named,
        largest(option.others for option in options),
        largest(option.items for option in options),
        largest(option.anywhere for option in options),
    )


def all_of(parts: Sequence[Bounds]) -> Bounds:
    """Return the bounds of a value that matches all parts.

    Only parts that constrain the same child add to its bound. `meetings` yields what `anywhere` is the largest of.
    """
    names = dict.fromkeys(name for part in parts for name in part.named)
    return Bounds(
        total(part.here for part in parts),
        {name: total(part.child(name) for part in parts) for name in names},
        total(part.others for part in parts),
        total(part.items for part in parts),
        largest([*(part.anywhere for part in parts), *map(total, meetings(parts))]),
    )


def meetings(parts: Sequence[Bounds]) -> Iterator[list[Met]]:
    """Yield what may meet in one text of a value that matches all parts: one bound for each part.

    A child is also taken to meet what the other parts say about the value itself, which errs on the safe side.
    """
    yield [part.here for part in parts]
    for name in dict.fromkeys(name for part in parts for name in part.named):
        yield [either(part.child(name), part.here) for part in parts]
    yield [either(part.others, part.here) for part in parts]
    yield [either(part.items, part.here) for part in parts]


def own_bounds(schema: Mapping[str, Any]) -> Met:
    """Return what the keywords of a schema itself say about a text."""
    patterns = ("pattern" in schema) + ("format" in schema) + any(name in schema for name in LENGTHS)
    return Met(patterns, len(listed(schema.get("enum"))))


def item_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the items of an array."""
    yield from (schema.get(name) for name in ITEM_SCHEMAS)
    for name in ITEM_LISTS:
        yield from listed(schema.get(name))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
