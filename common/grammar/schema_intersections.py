"""Bounds what a schema intersects: llguidance's time doubles with each pattern that the same text has to match."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.errors import InvalidGrammar
from common.grammar.limits import GrammarLimits
from common.grammar.schema_references import pointed
from common.grammar.text_bounds import (
    UNCONSTRAINED,
    TextBounds,
    ValueBounds,
    all_of,
    alternatives,
    combinations,
    item_schemas,
    largest,
    listed,
    mapped,
    own_bounds,
    total,
)

UNKNOWN = ValueBounds()
NAMES_PER_VALUE = 10  # properties that may be combined, for each value that a schema may have


def check_intersections(schemas: Iterable[Any], limits: GrammarLimits) -> None:
    """Raise InvalidGrammar if the schemas intersect too many patterns, or patterns with too many values."""
    for schema in schemas:
        try:
            _Intersections(schema, limits).check()
        except RecursionError as error:
            raise InvalidGrammar("the references of the schema form too long a chain") from error


class _Intersections:
    """Follows one schema and its references.

    Each part is visited once per pass. A part that refers to itself is read before it is known: it then counts as in
    the pass before, and passes are repeated until that makes no difference. Bounds only grow from pass to pass. Parts
    that lead to no circle are visited once in all.
    """

    def __init__(self, root: Any, limits: GrammarLimits) -> None:
        self._root = root
        self._limits = limits
        self._known: dict[int, ValueBounds] = {}
        self._visited: set[int] = set()  # in this pass
        self._open: set[int] = set()  # visits that have not ended
        self._early: set[int] = set()  # parts that were read in this pass before their own visit had ended
        self._stale = False  # one of them has another bound now
        self._final: set[int] = set()  # parts whose bound no later pass changes
        self._unsure = False  # the visit in progress has read a part that is not final
        self._visits = 0
        self._combined = 0  # properties of parts that were combined
        self._whole: ValueBounds | None = None

    def check(self) -> None:
        """Raise InvalidGrammar if too much is combined."""
        self._stale = True
        while self._stale:
            self._stale = False
            self._visited.clear()
            self._early.clear()
            self._of(self._root)

    def _of(self, schema: Any) -> ValueBounds:
        if not isinstance(schema, dict):
            return UNKNOWN
        key = id(schema)
        if key in self._final:
            return self._known[key]
        if key in self._open:
            self._early.add(key)
        if key in self._visited:
            self._unsure = True
            return self._known.get(key, UNKNOWN)
        self._visits += 1
        if self._visits > self._limits.max_values:
            raise InvalidGrammar("the references of the schema form too many cycles; use fewer")
        self._visited.add(key)
        self._open.add(key)
        outer, self._unsure = self._unsure, False
        found = self._visit(schema)
        if not self._unsure:
            self._final.add(key)
        self._unsure = self._unsure or outer
        self._open.remove(key)
        if key in self._early and found != self._known.get(key, UNKNOWN):
            self._stale = True
        self._known[key] = found
        return found

    def _visit(self, schema: dict[str, Any]) -> ValueBounds:
        parts = [self._own(schema), *map(self._of, listed(schema.get("allOf")))]
        for name in ("anyOf", "oneOf"):
            parts.append(alternatives([self._of(option) for option in listed(schema.get(name))]))
        if isinstance(schema.get("$ref"), str):
            parts.append(self._target(schema["$ref"]))
        parts = [part for part in parts if part != UNKNOWN]
        if len(parts) < 2:
            return parts[0] if parts else UNKNOWN
        self._combined += len(parts) * sum(len(part.named) for part in parts)
        if self._combined > NAMES_PER_VALUE * self._limits.max_values:
            raise InvalidGrammar("allOf and references combine too many properties; use fewer")
        for each in combinations(parts):
            self._check(total(each), sum(bounds != UNCONSTRAINED for bounds in each) > 1)
        return all_of(parts)

    def _own(self, schema: dict[str, Any]) -> ValueBounds:
        """Return what a schema says without the schemas that it combines."""
        here = own_bounds(schema)
        self._check(here, True)
        items = largest(self._of(item).anywhere for item in item_schemas(schema))
        properties = mapped(schema.get("properties"))
        named = {
            name: bounds
            for name, child in properties.items()
            if (bounds := self._of(child).anywhere) != UNCONSTRAINED
        }
        reaching = [schema.get("additionalProperties"), *mapped(schema.get("patternProperties")).values()]
        others = largest(self._of(child).anywhere for child in reaching)
        return ValueBounds(here, named, others, items, largest([here, items, others, *named.values()]))

    def _check(self, found: TextBounds, combined: bool) -> None:
        """Refuse bounds over the limits. `combined`: the patterns and literals come from different places."""
        limits = self._limits
        if found.patterns > limits.max_intersected:
            raise InvalidGrammar(
                f"allOf and references combine over {limits.max_intersected} patterns, formats and lengths; "
                "combine fewer"
            )
        if combined and found.patterns and found.literals > limits.max_intersected_values:
            raise InvalidGrammar(
                f"an enum of over {limits.max_intersected_values} values is combined with a pattern, format or length; "
                "leave one of them out"
            )

    def _target(self, reference: str) -> ValueBounds:
        """Return bounds of what a reference adds.

        llguidance refuses one that is not a path, or resolves it in other ways: it may then add everything.
        """
        if reference != "#" and not reference.startswith("#/"):
            return self._everything()
        return self._of(pointed(self._root, reference))  # llguidance refuses one to nowhere

    def _everything(self) -> ValueBounds:
        """Return bounds of what any part of the schema adds."""
        if self._whole is None:
            found = self._sum()
            self._check(found, False)
            self._whole = ValueBounds(found, {}, found, found, found)
        return self._whole

    def _sum(self) -> TextBounds:
        patterns = literals = 0
        waiting = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                own = own_bounds(value)
                patterns, literals = patterns + own.patterns, max(literals, own.literals)
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)
        return TextBounds(patterns, literals)
