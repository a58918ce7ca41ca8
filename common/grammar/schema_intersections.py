"""Bounds what a schema intersects: llguidance's time doubles with each pattern that the same text has to match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from common.errors import InvalidGrammar
from common.grammar.limits import GrammarLimits

CHILDREN = ("items", "additionalProperties")
LISTED_CHILDREN = ("prefixItems", "items")
NAMED_CHILDREN = ("properties", "patternProperties")
LENGTHS = ("minLength", "maxLength")


class Met(NamedTuple):
    """Upper bounds of what constrains one text, wherever in a value that is."""

    patterns: int = 0  # patterns, formats and bounds of its length
    literals: int = 0  # values of an enum that are compared with them


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
        self._known: dict[int, Met] = {}
        self._visited: set[int] = set()  # in this pass
        self._open: set[int] = set()  # visits that have not ended
        self._early: set[int] = set()  # parts that were read in this pass before their own visit had ended
        self._stale = False  # one of them has another bound now
        self._final: set[int] = set()  # parts whose bound no later pass changes
        self._unsure = False  # the visit in progress has read a part that is not final
        self._visits = 0
        self._whole: Met | None = None

    def check(self) -> None:
        """Raise InvalidGrammar if too much is combined."""
        self._stale = True
        while self._stale:
            self._stale = False
            self._visited.clear()
            self._early.clear()
            self._of(self._root)

    def _of(self, schema: Any) -> Met:
        if not isinstance(schema, dict):
            return Met()
        key = id(schema)
        if key in self._final:
            return self._known[key]
        if key in self._open:
            self._early.add(key)
        if key in self._visited:
            self._unsure = True
            return self._known.get(key, Met())
        self._visits += 1
        if self._visits > self._limits.max_values:
            raise InvalidGrammar("the references of the schema form too many circles; use fewer")
        self._visited.add(key)
        self._open.add(key)
        outer, self._unsure = self._unsure, False
        found = self._visit(schema)
        if not self._unsure:
            self._final.add(key)
        self._unsure = self._unsure or outer
        self._open.remove(key)
        if key in self._early and found != self._known.get(key, Met()):
            self._stale = True
        self._known[key] = found
        return found

    def _visit(self, schema: dict[str, Any]) -> Met:
        own = _own(schema)
        inner = _largest([own, *(self._of(child) for child in _children(schema))])
        parts = [self._of(each) for each in _list(schema.get("allOf"))]
        parts += [_largest(map(self._of, _list(schema.get(name)))) for name in ("anyOf", "oneOf")]
        if isinstance(schema.get("$ref"), str):
            parts.append(self._target(schema["$ref"]))
        total = Met(
            inner.patterns + sum(part.patterns for part in parts),
            max(inner.literals, *(part.literals for part in parts)),
        )
        meeting = sum(any(each) for each in (inner, *parts)) > 1 or all(own)
        self._check(total, meeting)
        return total

    def _check(self, total: Met, meeting: bool) -> None:
        limits = self._limits
        if total.patterns > limits.max_intersected:
            raise InvalidGrammar(
                f"allOf and references combine over {limits.max_intersected} patterns, formats and lengths; "
                "combine fewer"
            )
        if meeting and total.patterns and total.literals > limits.max_intersected_values:
            raise InvalidGrammar(
                f"an enum of over {limits.max_intersected_values} values is combined with a pattern, format or length; "
                "leave one of them out"
            )

    def _target(self, reference: str) -> Met:
        """Return what a reference may add. llguidance refuses one that is no path, or resolves it in other ways."""
        if not reference.startswith("#"):
            return self._everything()
        found = self._root
        for name in reference[1:].split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                return Met()  # llguidance refuses it
        if len(reference) > 1 and reference[1] != "/":
            return self._everything()
        return self._of(found)

    def _everything(self) -> Met:
        """Bound what any part of the schema adds."""
        if self._whole is None:
            self._whole = self._sum()
        return self._whole

    def _sum(self) -> Met:
        patterns = literals = 0
        waiting = [self._root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                own = _own(value)
                patterns, literals = patterns + own.patterns, max(literals, own.literals)
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)
        return Met(patterns, literals)


def _own(schema: dict[str, Any]) -> Met:
    """Return what the keywords of a schema itself say about a text."""
    patterns = ("pattern" in schema) + ("format" in schema) + any(name in schema for name in LENGTHS)
    return Met(patterns, len(_list(schema.get("enum"))))


def _children(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the schemas of values inside a value."""
    yield from (schema.get(name) for name in CHILDREN)
    for name in LISTED_CHILDREN:
        yield from _list(schema.get(name))
    for name in NAMED_CHILDREN:
        named = schema.get(name)
        if isinstance(named, dict):
            yield from named.values()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _largest(found: Iterable[Met]) -> Met:
    patterns = literals = 0
    for each in found:
        patterns, literals = max(patterns, each.patterns), max(literals, each.literals)
    return Met(patterns, literals)
