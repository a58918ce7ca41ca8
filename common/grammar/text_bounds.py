"""Bounds of what constrains one text of a value: at the value itself, and in each of its children."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ITEM_SCHEMAS = ("items", "additionalItems")
ITEM_LISTS = ("prefixItems", "items")
LENGTHS = ("minLength", "maxLength")


class TextBounds(NamedTuple):
    """Upper bounds of what constrains one text."""

    patterns: int = 0  # patterns, formats and bounds of its length
    literals: int = 0  # values of an enum that are compared with them


UNCONSTRAINED = TextBounds()


class ValueBounds(NamedTuple):
    """Upper bounds for the texts of a value that a schema accepts.

    Each child stands for all texts inside it. A property may have the bound of its name or `others`.
    """

    # the value itself
    here: TextBounds = UNCONSTRAINED
    # properties with a name that something constrains
    named: Mapping[str, TextBounds] = {}
    # properties that additionalProperties or patternProperties may reach
    others: TextBounds = UNCONSTRAINED
    # every item of an array
    items: TextBounds = UNCONSTRAINED
    # any text, wherever in the value it is
    anywhere: TextBounds = UNCONSTRAINED

    def child(self, name: str) -> TextBounds:
        """Return the bound of a property, which is at most that of its name or `others`."""
        return either(self.named.get(name, UNCONSTRAINED), self.others)


def either(one: TextBounds, other: TextBounds) -> TextBounds:
    """Return the bounds of a text that either of two constrains."""
    if other == UNCONSTRAINED:
        return one
    return TextBounds(max(one.patterns, other.patterns), max(one.literals, other.literals))


def largest(found: Iterable[TextBounds]) -> TextBounds:
    """Return the bounds of a text that one of those found constrains."""
    patterns = literals = 0
    for each in found:
        patterns = max(patterns, each.patterns)
        literals = max(literals, each.literals)
    return TextBounds(patterns, literals)


def total(found: Iterable[TextBounds]) -> TextBounds:
    """Return the bounds of a text that all of those found constrain."""
    patterns = literals = 0
    for each in found:
        patterns += each.patterns
        literals = max(literals, each.literals)
    return TextBounds(patterns, literals)


def alternatives(options: Sequence[ValueBounds]) -> ValueBounds:
    """Return the bounds of a value that matches one of the options."""
    if len(options) == 1:
        return options[0]
    named = dict[str, TextBounds]()
    for option in options:
        for name, bounds in option.named.items():
            named[name] = either(named.get(name, UNCONSTRAINED), bounds)
    return ValueBounds(
        largest(option.here for option in options),
        named,
        largest(option.others for option in options),
        largest(option.items for option in options),
        largest(option.anywhere for option in options),
    )


def all_of(parts: Sequence[ValueBounds]) -> ValueBounds:
    """Return the bounds of a value that matches all parts.

    Only parts that constrain the same child add to its bound. `combinations` yields what `anywhere` is the largest of.
    """
    names = dict.fromkeys(name for part in parts for name in part.named)
    return ValueBounds(
        total(part.here for part in parts),
        {name: total(part.child(name) for part in parts) for name in names},
        total(part.others for part in parts),
        total(part.items for part in parts),
        largest([*(part.anywhere for part in parts), *map(total, combinations(parts))]),
    )


def combinations(parts: Sequence[ValueBounds]) -> Iterator[list[TextBounds]]:
    """Yield what may constrain one text of a value that matches all parts: one bound for each part.

    What the other parts say about the value itself counts for a child, too, which errs on the safe side.
    """
    yield [part.here for part in parts]
    for name in dict.fromkeys(name for part in parts for name in part.named):
        yield [either(part.child(name), part.here) for part in parts]
    yield [either(part.others, part.here) for part in parts]
    yield [either(part.items, part.here) for part in parts]


def own_bounds(schema: Mapping[str, Any]) -> TextBounds:
    """Return what the keywords of a schema itself say about a text."""
    patterns = ("pattern" in schema) + ("format" in schema) + any(name in schema for name in LENGTHS)
    return TextBounds(patterns, len(listed(schema.get("enum"))))


def item_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas of the items of an array."""
    yield from (schema.get(name) for name in ITEM_SCHEMAS)
    for name in ITEM_LISTS:
        yield from listed(schema.get(name))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def mapped(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
