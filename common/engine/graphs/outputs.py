"""The outputs of graphs: every field is declared, narrowed to live rows, and cloned if it outlives the next replay.

Clone rule: the output of a graph is in memory that the next replay of any graph of the same runner overwrites. A
field that is read later than that (by the host one step later, by a relay row, by a request object) is declared
`kept` and cloned on narrowing; everything else must be consumed on the same stream before the next replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from common.engine.graphs.spec import Axis, ShapeKey

Output = TypeVar("Output")


class OutputError(TypeError):
    """An output type and its declaration differ; the text contains the field."""


@dataclass(frozen=True, slots=True)
class OutField:
    """The axis along which one field is narrowed. A field that is None stays None."""

    axis: Axis
    kept: bool = False  # read after the next replay, therefore cloned


class OutputSpec(Generic[Output]):
    """Declares every field of a dataclass or NamedTuple. Raises OutputError if one is missing or unknown.

    So a new field of the type fails here, at start-up and in every test, and is never dropped silently.
    """

    def __init__(self, kind: type[Output], declared: Mapping[str, OutField]) -> None:
        names = _field_names(kind)
        if undeclared := [name for name in names if name not in declared]:
            raise OutputError(
                f"{kind.__name__}.{', '.join(undeclared)}: not declared; add its axis to the graph's OutputSpec, or "
                "replay would return it unnarrowed"
            )
        if unknown := [name for name in declared if name not in names]:
            raise OutputError(f"{kind.__name__} has no field {', '.join(unknown)}")
        self.kind = kind
        self.declared = dict(declared)

    def narrow(self, output: Output, captured: ShapeKey, live: ShapeKey) -> Output:
        """Return the live rows of the output of a graph of shape `captured`.

        Raises OutputError on a wrong row count.
        """
        narrowed: dict[str, Any] = {}
        for name, how in self.declared.items():
            value = getattr(output, name)
            narrowed[name] = None if value is None else self._narrow(name, how, value, captured, live)
        return self.kind(**narrowed)

    def _narrow(self, name: str, how: OutField, value: Any, captured: ShapeKey, live: ShapeKey) -> Any:
        if not isinstance(value, Tensor):
            raise OutputError(
                f"{self.kind.__name__}.{name} is a {type(value).__name__}; graphs return tensors"
            )
        rows = captured.rows(how.axis)
        if value.shape[0] != rows:
            raise OutputError(
                f"{self.kind.__name__}.{name}: {value.shape[0]} rows, declared one per {how.axis.value} of {rows}"
            )
        value = value[: live.rows(how.axis)]
        return value.clone() if how.kept else value


def map_tensors(output: Output, change: Callable[[Tensor], Tensor]) -> Output:
    """Return the same output with each tensor changed; accepts tensors, None, tuples, NamedTuples and dataclasses."""
    value: Any = output
    if isinstance(value, Tensor):
        return cast(Output, change(value))
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return cast(Output, type(value)(*items) if hasattr(value, "_fields") else tuple(items))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)}
        return cast(Output, replace(value, **changed))
    return output


def _field_names(kind: type[Any]) -> list[str]:
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    names = getattr(kind, "_fields", None)
    if names is None:
        raise OutputError(f"{kind.__name__} is neither a dataclass nor a NamedTuple")
    return list(names)
