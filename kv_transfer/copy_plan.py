"""Which bytes go where: pages to runs, runs to copies, and who sends which heads between unequal TP sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kv_transfer.layout import KvLayout, Plane, head_range


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


def copies(src: KvLayout, dst: KvLayout, page_runs: Iterable[Run], planes: slice = slice(None)) -> list[Copy]:
    """Every copy that moves these runs, plane by plane; only the heads that both ranks hold.

    Equal head ranges give one copy per run and plane, others one piece per token (small: see `whole_rows`).
    """
    page_runs = list(page_runs)
    plan: list[Copy] = []
    for a, b in zip(src.planes[planes], dst.planes[planes], strict=True):
        if src.heads(a) == dst.heads(b):
            for run in page_runs:
                plan.append(
                    Copy(
                        a.offset + run.src * a.page_bytes,
                        b.offset + run.dst * b.page_bytes,
                        run.pages * a.page_bytes,
                    )
                )
        else:
            plan.extend(_strided(src, dst, a, b, page_runs))
    return plan


def whole_rows(src: KvLayout, dst: KvLayout) -> bool:
    """True when copies are whole runs of pages; False when heads have to be cut out token by token."""
    return all(src.heads(a) == dst.heads(b) for a, b in zip(src.planes, dst.planes, strict=True))


def _strided(src: KvLayout, dst: KvLayout, a: Plane, b: Plane, page_runs: list[Run]) -> Iterable[Copy]:
    ours, theirs = src.heads(a), dst.heads(b)
    first, last = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    if first >= last:
        return
    head_bytes = a.head_dim * src.item_bytes
    src_row, dst_row = a.kv_heads * head_bytes, b.kv_heads * head_bytes
    length = (last - first) * head_bytes
    for run in page_runs:
        src_at = a.offset + run.src * a.page_bytes + (first - ours.start) * head_bytes
        dst_at = b.offset + run.dst * b.page_bytes + (first - theirs.start) * head_bytes
        for token in range(run.pages * src.page_size):
            yield Copy(src_at + token * src_row, dst_at + token * dst_row, length)


def senders(total_kv_heads: int, src_tp: int, dst_rank: int, dst_tp: int) -> tuple[tuple[int, range], ...]:
    """(prefill rank, global heads it sends) for one decode rank; each head exactly once, by one rank.

    With replicated heads several prefill ranks hold the same bytes: decode ranks that share a head are spread
    over them, and with equal tensor-parallel sizes every rank is served by its own number.
    """
    chosen: dict[int, list[int]] = {}
    for head in head_range(total_kv_heads, dst_rank, dst_tp):
        holders = [rank for rank in range(src_tp) if head in head_range(total_kv_heads, rank, src_tp)]
        takers = [rank for rank in range(dst_tp) if head in head_range(total_kv_heads, rank, dst_tp)]
        chosen.setdefault(holders[takers.index(dst_rank) % len(holders)], []).append(head)
    return tuple((rank, range(heads[0], heads[-1] + 1)) for rank, heads in sorted(chosen.items()))


def sole_pair(src: KvLayout, dst: KvLayout) -> bool:
    """True when this prefill rank serves this decode rank and no other: one Sender, one Receiver suffice."""
    return src.tp_size == dst.tp_size and src.tp_rank == dst.tp_rank
