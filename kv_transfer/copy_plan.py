"""Which bytes go where: pages to runs, and runs to copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.kv_cache.pool_layout import PoolLayout


class Run(NamedTuple):
    """`pages` pages that are consecutive on both sides."""

    src: int
    dst: int
    pages: int


class Copy(NamedTuple):
    """Bytes [src, src + length) of the source region go to [dst, dst + length) of the destination region."""

    src: int
    dst: int
    length: int


def runs(src_pages: Sequence[int], dst_pages: Sequence[int]) -> list[Run]:
    """Maximal runs of zip(src_pages, dst_pages), in order. The two must be equally long."""
    found: list[Run] = []
    src = dst = count = 0
    for a, b in zip(src_pages, dst_pages, strict=True):
        if count and a == src + count and b == dst + count:
            count += 1
            continue
        if count:
            found.append(Run(src, dst, count))
        src, dst, count = a, b, 1
    if count:
        found.append(Run(src, dst, count))
    return found


def copies(
    src: PoolLayout, dst: PoolLayout, page_runs: Iterable[Run], planes: slice = slice(None)
) -> list[Copy]:
    """Every copy that moves these runs, plane by plane: one per run and plane."""
    page_runs = list(page_runs)
    return [
        Copy(a.offset + run.src * a.page_bytes, b.offset + run.dst * b.page_bytes, run.pages * a.page_bytes)
        for a, b in zip(src.planes[planes], dst.planes[planes], strict=True)
        for run in page_runs
    ]


def sole_pair(src: PoolLayout, dst: PoolLayout) -> bool:
    """True when this prefill rank serves this decode rank and no other: one Sender, one Receiver suffice."""
    return src.tp_size == dst.tp_size and src.tp_rank == dst.tp_rank
