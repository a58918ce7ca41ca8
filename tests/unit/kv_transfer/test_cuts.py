"""Cuts between tensor-parallel sizes agree with lists of what each rank holds."""

from __future__ import annotations

import itertools
import math

import pytest

from common.kv_cache.plane import HeadGroup, Kept, Plane
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.cuts import RankPair, cuts, sources
from tests.fakes.part_pools import SIZES as POOL_SIZES
from tests.fakes.part_pools import layout_of, pairs

PLANES = (
    Plane("target", 0, "k", Kept.PAGED, (8, 4), "bfloat16", 0, (HeadGroup(8, 1),)),
    Plane("target", 0, "v", Kept.PAGED, (2, 4), "bfloat16", 0, (HeadGroup(2, 1),)),
    Plane("target", 1, "latent", Kept.PAGED, (18,), "bfloat16"),
    Plane(
        "target",
        2,
        "conv",
        Kept.PER_REQUEST,
        (64, 3),
        "float32",
        0,
        (HeadGroup(4, 4), HeadGroup(4, 4), HeadGroup(8, 4)),
    ),
    Plane("target", 2, "recurrent", Kept.PER_REQUEST, (8, 4, 2), "float32", 0, (HeadGroup(8, 1),)),
    Plane("draft", 0, "k", Kept.PAGED, (1, 6), "float16", 0, (HeadGroup(1, 1),)),
)
SIZES = (1, 2, 4, 8)


def held(plane: Plane, rank: int, size: int) -> list[int]:
    """Return the global indices of the sharded axis that a rank holds, in its own order."""
    if not plane.groups:
        return list(range(plane.entry[plane.axis]))
    found: list[int] = []
    base = 0
    for heads, width in ((group.heads, group.width) for group in plane.groups):
        first = rank * heads // size
        found += range(base + first * width, base + (first + max(1, heads // size)) * width)
        base += heads * width
    return found


@pytest.mark.parametrize("plane", PLANES, ids=[plane.where for plane in PLANES])
@pytest.mark.parametrize(("src_size", "dst_size"), list(itertools.product(SIZES, SIZES)))
def test_every_rank_gets_every_value_once(plane: Plane, src_size: int, dst_size: int) -> None:
    for dst in range(dst_size):
        theirs = held(plane, dst, dst_size)
        filled = [0] * len(theirs)
        for src in range(src_size):
            ours = held(plane, src, src_size)
            for cut in cuts(plane, RankPair(src, src_size, dst, dst_size)):
                assert ours[cut.src : cut.src + cut.length] == theirs[cut.dst : cut.dst + cut.length]
                for index in range(cut.dst, cut.dst + cut.length):
                    filled[index] += 1
        assert filled == [1] * len(theirs)


@pytest.mark.parametrize("size", SIZES)
def test_equal_sizes_are_served_by_their_own_number_in_one_cut(size: int) -> None:
    for plane in PLANES:
        for src, dst in itertools.product(range(size), repeat=2):
            found = cuts(plane, RankPair(src, size, dst, size))
            whole = len(held(plane, dst, size))
            assert [(cut.src, cut.dst, cut.length) for cut in found] == (
                [(0, 0, whole)] if src == dst else []
            )


def test_replicas_share_their_destinations() -> None:
    """With one head, four prefill ranks hold it, and each serves two of eight decode ranks."""
    spec = PoolSpec(2, PLANES[-1:])
    assert [sorted(sources(spec, 4, rank, 8)) for rank in range(8)] == [[0], [1], [2], [3]] * 2


def test_sources_are_the_ranks_of_all_planes() -> None:
    assert sources(PoolSpec(2, PLANES), 4, 0, 1) == {0, 1, 2, 3}
    assert sources(PoolSpec(2, PLANES[1:2]), 4, 0, 1) == {0, 2}  # two heads on four ranks
    assert math.prod(len(sources(PoolSpec(2, PLANES), 1, rank, 4)) for rank in range(4)) == 1


@pytest.mark.parametrize(("src_size", "dst_size"), POOL_SIZES)
def test_what_all_ranks_send_fills_the_pools_of_all_receivers(src_size: int, dst_size: int) -> None:
    plans = list(pairs(src_size, dst_size))
    pools = [layout_of(9, 5, rank, dst_size) for rank in range(dst_size)]
    kept = {
        kind: sum(each.page_bytes for pool in pools for each in pool.placed if each.plane.kept is kind)
        for kind in Kept
    }
    assert sum(plan.page_bytes for plan in plans) == kept[Kept.PAGED] > 0
    assert sum(plan.state_bytes for plan in plans) == kept[Kept.PER_REQUEST] > 0
