"""The static inputs of graphs: declared slots that are loaded and padded as a whole, so no stale value is replayed.

Every variant of a graph takes every slot; a batch without the value of one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from common.engine.graphs.spec import Axis, ShapeKey

Batch = TypeVar("Batch")
Inputs: TypeAlias = Mapping[str, Tensor]


class SlotError(ValueError):
    """A batch does not fit the declared slots; the text contains the slot and the remedy."""


@dataclass(frozen=True, slots=True)
class Fill:
    """Sets every element of the padding to one value."""

    value: float

    def reset(self, padding: Tensor) -> None:
        padding.fill_(self.value)


ZERO = Fill(0)
ROW0 = Fill(0)  # an index of request rows: row 0 is reserved for padding


@dataclass(frozen=True, slots=True, eq=False)
class Slot(Generic[Batch]):
    """One static input [rows of the axis, *width]."""

    name: str
    axis: Axis
    width: tuple[int, ...]
    dtype: torch.dtype
    source: Callable[[Batch], Tensor | None]
    pad: Fill = ZERO
    # Value that the debug switch writes into the padding. "auto": NaN, or the largest id. "keep": the padding value
    # is the contract itself, such as an address that must be in page 0 or row 0.
    poison: Literal["auto", "keep"] | Fill = "auto"


class StaticInputs(Generic[Batch]):
    """Storage of all slots for the largest shape; smaller graphs use its first rows.

    Args:
        poisoned: debug switch. Padding is filled with NaN and maximum ids instead of its padding value, to show
            that no row depends on it.
    """

    def __init__(
        self,
        slots: Sequence[Slot[Batch]],
        largest: ShapeKey,
        device: torch.device | str,
        poisoned: bool = False,
    ) -> None:
        if len({slot.name for slot in slots}) != len(slots):
            raise ValueError(f"two slots share a name: {[slot.name for slot in slots]}")
        self.slots = tuple(slots)
        self.poisoned = poisoned
        self._tensors = {
            slot.name: torch.empty((largest.rows(slot.axis), *slot.width), dtype=slot.dtype, device=device)
            for slot in slots
        }
        for slot in slots:
            slot.pad.reset(self._tensors[slot.name])

    def idle(self, shape: ShapeKey) -> Inputs:
        """Return the inputs of one graph, all padding: the graph is captured on them."""
        views = {}
        for slot in self.slots:
            views[slot.name] = self._tensors[slot.name][: shape.rows(slot.axis)]
            slot.pad.reset(views[slot.name])
        return views

    def load(self, batch: Batch, live: ShapeKey, shape: ShapeKey) -> Inputs:
        """Copy the live rows in and reset all following rows. Raises SlotError."""
        views = {}
        for name, value in self.live(batch, live).items():
            slot, static = self._slot(name), self._tensors[name]
            rows, count = shape.rows(slot.axis), live.rows(slot.axis)
            static[:count].copy_(value)
            if count < rows:
                self._pad(slot, static[count:rows])
            views[name] = static[:rows]
        return views

    def live(self, batch: Batch, live: ShapeKey) -> Inputs:
        """Return the batch's own tensors, checked against the slots: the inputs of an eager run. Raises SlotError."""
        return {
            slot.name: _checked(slot, slot.source(batch), live, self._tensors[slot.name].device)
            for slot in self.slots
        }

    def _pad(self, slot: Slot[Batch], padding: Tensor) -> None:
        slot.pad.reset(padding)
        if self.poisoned and slot.poison != "keep":
            poison = Fill(poison_value(slot.dtype)) if slot.poison == "auto" else slot.poison
            poison.reset(padding)

    def _slot(self, name: str) -> Slot[Batch]:
        return next(slot for slot in self.slots if slot.name == name)


def _checked(slot: Slot[Batch], value: Tensor | None, live: ShapeKey, device: torch.device) -> Tensor:
    where = f"slot {slot.name!r}"
    if value is None:
        raise SlotError(f"{where}: the batch has none; let its source compute it")
    wanted = (live.rows(slot.axis), *slot.width)
    if tuple(value.shape) != wanted:
        raise SlotError(
            f"{where}: found {tuple(value.shape)}, declared {wanted} ([{slot.axis.value}s, *width]); the width comes "
            "from the model's config on both sides, so make both use the same function"
        )
    if value.dtype != slot.dtype or value.device.type != device.type:
        raise SlotError(
            f"{where}: found {value.dtype} on {value.device}, declared {slot.dtype} on {device}; convert it where the "
            "batch is made"
        )
    return value


def poison_value(dtype: torch.dtype) -> float:
    """Return a value that is noticed in any result that depends on it."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
