"""PairPlan: which bytes of each page and each state slot one prefill rank sends to one decode rank.

A plan is made once for each pair of ranks; a write then only adds page ids to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from common.kv_cache.plane import Kept
from common.kv_cache.pool_layout import PlacedPlane, PoolLayout
from kv_transfer.cuts import Cut, RankPair, cuts


class StridedRows(NamedTuple):
    """Rows of equal length in every item (page or slot) of one plane; all values are bytes."""

    offset: int  # where the first row of item 0 begins
    item: int  # from the start of one item to the next
    length: int  # bytes per row
    rows: int  # in each item
    stride: int  # from the start of one row to the next


class RowsPair(NamedTuple):
    """The same values on both sides: equal row lengths and equal numbers of rows."""

    src: StridedRows
    dst: StridedRows


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The blocks of one of the two ranks, over which it computes checksums."""

    layout: PoolLayout
    pages: tuple[StridedRows, ...]
    state: tuple[StridedRows, ...]
    whole: bool  # pages are sent unchanged


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """`planes` has the parts of each paged plane, `state` those of all planes that are kept per request."""

    src: Side
    dst: Side
    planes: tuple[tuple[RowsPair, ...], ...]
    state: tuple[RowsPair, ...]
    page_bytes: int  # sent per page, over all planes
    state_bytes: int  # sent for the state of one request

    @property
    def whole(self) -> bool:
        """True if pages of both sides are identical: one copy moves a run of pages of a plane."""
        return self.src.whole


def pair_plan(src: PoolLayout, dst: PoolLayout) -> PairPlan:
    """Return the plan for two layouts that are `compatible`."""
    ranks = RankPair(src.tp_rank, src.tp_size, dst.tp_rank, dst.tp_size)
    planes: list[tuple[RowsPair, ...]] = []
    state: list[RowsPair] = []
    for a, b in zip(src.placed, dst.placed, strict=True):
        parts = tuple(_part(src, a, b, cut) for cut in cuts(a.plane, ranks))
        if a.plane.kept is Kept.PAGED:
            planes.append(parts)
        else:
            state.extend(parts)
    pages = [part for parts in planes for part in parts]
    whole = all(len(parts) == 1 and _is_whole(parts[0]) for parts in planes)
    return PairPlan(
        Side(src, tuple(part.src for part in pages), tuple(part.src for part in state), whole),
        Side(dst, tuple(part.dst for part in pages), tuple(part.dst for part in state), whole),
        tuple(planes),
        tuple(state),
        sum(part.src.rows * part.src.length for part in pages),
        sum(part.src.rows * part.src.length for part in state),
    )


def _part(src: PoolLayout, a: PlacedPlane, b: PlacedPlane, cut: Cut) -> RowsPair:
    """Return one part. Rows run along the sharded axis; if they are contiguous on both sides, an item is one row."""
    plane = a.plane
    tokens = src.page_size if plane.kept is Kept.PAGED else 1
    rows = tokens * math.prod(plane.entry[: plane.axis])
    value = math.prod(plane.entry[plane.axis + 1 :]) * plane.item_bytes  # one index of the axis
    stride_a, stride_b = a.entry[plane.axis] * value, b.entry[plane.axis] * value
    length = cut.length * value
    src_at, dst_at = a.offset + cut.src * value, b.offset + cut.dst * value
    if rows == 1 or (length == stride_a == stride_b):
        rows, length = 1, rows * length
        stride_a = stride_b = length
    return RowsPair(
        StridedRows(src_at, a.page_bytes, length, rows, stride_a),
        StridedRows(dst_at, b.page_bytes, length, rows, stride_b),
    )


def _is_whole(part: RowsPair) -> bool:
    return part.src.length == part.src.item == part.dst.item
