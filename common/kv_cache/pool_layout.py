"""The memory layout of one rank's planes, as a value that peers compare and from which the engine builds its pool.

Planes are consecutive in one flat byte buffer in the order of the spec, each contiguous: [num_pages, page_size,
*entry] for a paged plane, [num_slots, *entry] for one that is kept per request. Target and draft share page ids, so
one page id names one slice of every paged plane. Page 0 and slot 0 are padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Final

import msgspec

from common.kv_cache.plane import Kept, Owner, Plane, Size
from common.kv_cache.pool_spec import PoolSpec
from common.kv_cache.shard import Shard

PLANE_ALIGN: Final = 4096  # bytes; planes start at memory pages, which every transport can register

MAX_RANKS: Final = 64  # per node

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class PlacedPlane:
    """A plane of one rank: an array of items of equal size, which are pages or slots."""

    plane: Plane
    offset: int  # bytes from the start of the buffer
    items: int  # number of pages or slots
    entry: tuple[int, ...]  # the shape of one entry on this rank
    page_bytes: int  # bytes of one item

    @property
    def nbytes(self) -> int:
        return self.items * self.page_bytes


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The layout of one rank's pool. Offsets are derived, so a layout from the wire cannot contradict itself."""

    # identifies the weights: target, or target+draft
    fingerprint: Annotated[str, msgspec.Meta(max_length=256)]
    spec: PoolSpec
    num_pages: Size
    num_slots: Count = 0  # slots of per-request state; 0 if the spec has no such planes
    tp_rank: Count = 0
    tp_size: Ranks = 1

    def __post_init__(self) -> None:
        """Raise ValueError, which msgspec turns into a decode error, unless the planes divide among the ranks."""
        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank {self.tp_rank} is not below tp_size {self.tp_size}")
        for plane in self.spec.planes:
            if plane.kept is Kept.PER_REQUEST and self.num_slots < 2:
                raise ValueError(f"{plane.where}: {self.num_slots} slots leave none besides padding slot 0")
            for group in plane.groups:
                if group.heads % self.tp_size and self.tp_size % group.heads:
                    raise ValueError(
                        f"{plane.where}: {group.heads} heads cannot be split over {self.tp_size} ranks"
                    )

    @cached_property
    def placed(self) -> tuple[PlacedPlane, ...]:
        """Every plane of the spec, in its order."""
        return tuple(self._place())

    @cached_property
    def planes(self) -> tuple[PlacedPlane, ...]:
        """The paged planes: each page id names one slice of all of them."""
        return tuple(each for each in self.placed if each.plane.kept is Kept.PAGED)

    @cached_property
    def total_bytes(self) -> int:
        """Size of the flat buffer that contains every plane."""
        last = self.placed[-1]
        return _aligned(last.offset + last.nbytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page over all paged planes, which is its cost in memory and on the wire."""
        return sum(each.page_bytes for each in self.planes)

    @property
    def page_size(self) -> int:
        return self.spec.page_size

    def of(self, owner: Owner) -> tuple[PlacedPlane, ...]:
        """Return the planes of one model."""
        return tuple(each for each in self.placed if each.plane.owner == owner)

    def stored(self, layer: int) -> int:
        """Return how many of `planes`, from the first on, are complete once target layers 0 to `layer` are stored."""
        return self._stored[min(layer, len(self._stored) - 1)]

    @cached_property
    def _stored(self) -> list[int]:
        layers = [each.plane.layer for each in self.planes if each.plane.owner == "target"]
        return [sum(each <= layer for each in layers) for layer in range(max(layers, default=0) + 1)]

    def _place(self) -> Iterator[PlacedPlane]:
        offset, shard = 0, Shard(self.tp_rank, self.tp_size)
        for plane in self.spec.planes:
            entry = shard.entry(plane)
            tokens, items = self.spec.page_size, self.num_pages
            if plane.kept is Kept.PER_REQUEST:
                tokens, items = 1, self.num_slots
            size = tokens * math.prod(entry) * plane.item_bytes
            yield PlacedPlane(plane, offset, items, entry, size)
            offset += _aligned(items * size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PLANE_ALIGN) * PLANE_ALIGN
