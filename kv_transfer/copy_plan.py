"""Turns page lists into runs of pages, and runs into copies of one or many rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kv_transfer.pair_plan import PairPlan, RowsPair


class PageRun(NamedTuple):
    """`pages` pages that are consecutive on both sides."""

    src: int
    dst: int
    pages: int


class Copy(NamedTuple):
    """`rows` rows of `length` bytes from `src` of the source region to `dst` of the destination region.

    Row starts are `src_stride` and `dst_stride` bytes apart; both are 0 for a single row.
    """

    src: int
    dst: int
    length: int
    rows: int = 1
    src_stride: int = 0
    dst_stride: int = 0

    @property
    def nbytes(self) -> int:
        return self.length * self.rows


def runs(src_pages: Sequence[int], dst_pages: Sequence[int]) -> list[PageRun]:
    """Return the maximal runs of zip(src_pages, dst_pages), in order. Both must have the same length."""
    found: list[PageRun] = []
    src = dst = count = 0
    for a, b in zip(src_pages, dst_pages, strict=True):
        if count and a == src + count and b == dst + count:
            count += 1
            continue
        if count:
            found.append(PageRun(src, dst, count))
        src, dst, count = a, b, 1
    if count:
        found.append(PageRun(src, dst, count))
    return found


def copies(plan: PairPlan, page_runs: Sequence[PageRun], planes: slice = slice(None)) -> list[Copy]:
    """Return every copy that moves these runs, plane by plane: one per run and part of a plane."""
    if not plan.whole:
        return [_copy(part, run) for parts in plan.planes[planes] for part in parts for run in page_runs]
    return [
        Copy(src.offset + run.src * src.item, dst.offset + run.dst * dst.item, run.pages * src.item)
        for ((src, dst),) in plan.planes[planes]
        for run in page_runs
    ]


def state_copies(plan: PairPlan, src_slot: int, dst_slot: int) -> list[Copy]:
    """Return every copy that moves the state of one request."""
    return [_copy(part, PageRun(src_slot, dst_slot, 1)) for part in plan.state]


def single_rows(plan: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the same bytes as copies of one row each, for transports that have no strided copy."""
    for copy in plan:
        for row in range(copy.rows):
            yield Copy(copy.src + row * copy.src_stride, copy.dst + row * copy.dst_stride, copy.length)


def _copy(part: RowsPair, run: PageRun) -> Copy:
    src, dst = part
    at = src.offset + run.src * src.item, dst.offset + run.dst * dst.item
    if src.length == src.item == dst.item:
        return Copy(*at, run.pages * src.length)
    rows = run.pages * src.rows
    if rows == 1:
        return Copy(*at, src.length)
    # The rows of an item fill it, so rows of consecutive items have the same stride.
    return Copy(*at, src.length, rows, src.item // src.rows, dst.item // dst.rows)
