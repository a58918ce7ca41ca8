"""Computes from the shard axis of each plane what one tensor-parallel rank sends to another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from common.kv_cache.plane import HeadGroup, Plane
from common.kv_cache.pool_spec import PoolSpec
from common.kv_cache.shard import head_range


class RankPair(NamedTuple):
    """One prefill rank and one decode rank, each with the number of ranks on its side."""

    src: int
    src_size: int
    dst: int
    dst_size: int


class Cut(NamedTuple):
    """Values [src, src + length) of the sender's shard axis are values [dst, dst + length) of the receiver's."""

    src: int
    dst: int
    length: int


def cuts(plane: Plane, ranks: RankPair) -> tuple[Cut, ...]:
    """Return what rank `src` sends to rank `dst`. Over all sources a destination gets every value exactly once.

    Source ranks that hold replicas divide the destinations among themselves; with equal sizes every rank receives
    from the rank of its own number.
    """
    return _cuts(plane.entry[plane.axis], plane.groups, ranks)


@lru_cache(maxsize=1024)  # most planes of a model are identical
def _cuts(length: int, groups: tuple[HeadGroup, ...], ranks: RankPair) -> tuple[Cut, ...]:
    if not groups:
        serves = ranks.dst * ranks.src_size // ranks.dst_size == ranks.src
        return (Cut(0, 0, length),) if serves else ()
    found: list[Cut] = []
    src_at = dst_at = 0
    for group in groups:
        for cut in _group_cuts(group, ranks):
            moved = Cut(src_at + cut.src, dst_at + cut.dst, cut.length)
            last = found[-1] if found else Cut(-1, -1, 0)
            if (moved.src, moved.dst) == (last.src + last.length, last.dst + last.length):
                found[-1] = last._replace(length=last.length + moved.length)
            else:
                found.append(moved)
        src_at += len(head_range(group.heads, ranks.src, ranks.src_size)) * group.width
        dst_at += len(head_range(group.heads, ranks.dst, ranks.dst_size)) * group.width
    return tuple(found)


def sources(spec: PoolSpec, src_size: int, dst: int, dst_size: int) -> frozenset[int]:
    """Return the prefill ranks that a decode rank receives anything from."""
    return frozenset(
        src
        for src in range(src_size)
        if any(cuts(plane, RankPair(src, src_size, dst, dst_size)) for plane in spec.planes)
    )


def _group_cuts(group: HeadGroup, ranks: RankPair) -> Iterator[Cut]:
    ours = head_range(group.heads, ranks.src, ranks.src_size)
    theirs = head_range(group.heads, ranks.dst, ranks.dst_size)
    for head in theirs:
        holders = _holders(group.heads, head, ranks.src_size)
        takers = _holders(group.heads, head, ranks.dst_size)
        if holders[takers.index(ranks.dst) % len(holders)] == ranks.src:
            at = (head - ours.start) * group.width, (head - theirs.start) * group.width
            yield Cut(*at, group.width)


def _holders(heads: int, head: int, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if head in head_range(heads, rank, ranks)]
