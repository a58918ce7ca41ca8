"""Refuses schemas whose values would have no end, such as one that refers to nothing but itself.

llguidance compiles them. Where other text comes first, such as reasoning, they would fail only in the middle of an
answer; a list that has to contain such a list goes on until max_tokens cuts it off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from common.errors import InvalidGrammar
from common.grammar.schema_references import pointed
from common.grammar.text_bounds import item_schemas, listed, mapped

MAX_PATH = 200  # characters of a path in a message


def check_endings(schemas: Iterable[Any]) -> None:
    """Raise InvalidGrammar if a schema has a part that no finite value matches, because each contains another one."""
    for root in schemas:
        _Endings(root).check()


class _Endings:
    """The parts of one schema that answers may reach, and which of them have a finite value.

    A part has one if, in each of its groups of schemas, one does. Every part starts without, so that circles count only
    once something ends them.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # Each key is the id of a part.
        self._paths: dict[int, str] = {}
        self._open: dict[int, int] = {}  # the number of its groups that have no finite value yet
        self._waiting: dict[int, list[list[int]]] = {}  # the groups that it is in, each [id of the owner]
        self._refers = False

    def check(self) -> None:
        """Raise InvalidGrammar for the first part without a finite value."""
        self._collect()
        if not self._refers:
            return
        ended = deque(key for key, groups in self._open.items() if not groups)
        while ended:
            for group in self._waiting.get(ended.popleft(), ()):
                if group:  # not yet settled by another of its schemas
                    owner = group.pop()
                    self._open[owner] -= 1
                    if not self._open[owner]:
                        ended.append(owner)
        endless = next((key for key, groups in self._open.items() if groups), None)
        if endless is not None:
            raise InvalidGrammar(
                f"the schema at {self._paths[endless][:MAX_PATH]} refers to itself without an end, so that no value "
                "can match it; give it an alternative that ends, such as null, or make the reference optional"
            )

    def _collect(self) -> None:
        """Visit every part that the root reaches."""
        reached: list[tuple[Any, str]] = [(self._root, "#")]
        while reached:
            part, path = reached.pop()
            if not isinstance(part, dict) or id(part) in self._paths:
                continue
            self._paths[id(part)] = path
            groups = list(self._groups(part))
            self._open[id(part)] = len(groups)
            for group in groups:
                owner = [id(part)]
                for each in group:
                    self._waiting.setdefault(id(each), []).append(owner)
            reached += ((child, f"{path}/{name}") for name, child in self._children(part))

    def _groups(self, part: dict[str, Any]) -> Iterator[list[Any]]:
        """Yield groups of schemas. A group in which anything has no references, such as true, is left out."""
        target = self._target(part)
        found = [[target], *([each] for each in listed(part.get("allOf")))]
        found += [listed(part.get(name)) for name in ("anyOf", "oneOf")]
        kind = part.get("type")
        if kind in ("object", ["object"]):
            properties = mapped(part.get("properties"))
            names = [name for name in listed(part.get("required")) if isinstance(name, str)]
            found += [[properties.get(name)] for name in names]
        if kind in ("array", ["array"]):
            fewest = part.get("minItems")
            fewest = fewest if isinstance(fewest, int) else 0
            first = listed(part.get("prefixItems"))
            found += [[each] for each in first[: max(fewest, 0)]]
            if fewest > len(first):
                found.append([part.get("items")])
        yield from (group for group in found if group and all(isinstance(each, dict) for each in group))

    def _children(self, part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name in ("properties", "patternProperties"):
            for key, child in mapped(part.get(name)).items():
                yield f"{name}/{key}", child
        for name in ("allOf", "anyOf", "oneOf"):
            for index, child in enumerate(listed(part.get(name))):
                yield f"{name}/{index}", child
        yield "additionalProperties", part.get("additionalProperties")
        for child in item_schemas(part):
            yield "items", child
        yield "$ref", self._target(part)

    def _target(self, part: dict[str, Any]) -> Any:
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return None
        self._refers = True
        return pointed(self._root, reference)
