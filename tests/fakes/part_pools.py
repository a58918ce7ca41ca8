"""Pairs of pools whose ranks hold different shares, for tests of the kernel that moves parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.kv_cache.plane import HeadGroup, Kept, Plane
from common.kv_cache.pool_layout import PoolLayout
from common.kv_cache.pool_spec import PoolSpec
from kv_transfer.pair_plan import PairPlan, pair_plan
from tests.fakes.pools import attention_planes

SPEC = PoolSpec(
    3,
    (
        # Rows of 2, 4, 6 and 16 bytes and more, whose words differ from the checksum's in some pairs of sizes.
        *attention_planes("target", 2, 4, 5, "bfloat16"),
        *attention_planes("draft", 1, 8, 3, "float32"),
        Plane("target", 0, "inner", Kept.PAGED, (3, 8), "bfloat16", 1, (HeadGroup(8, 1),)),
        Plane("target", 0, "odd", Kept.PAGED, (5, 8), "uint8", 1, (HeadGroup(8, 1),)),
        Plane(
            "target",
            0,
            "conv",
            Kept.PER_REQUEST,
            (64, 3),
            "bfloat16",
            0,
            (HeadGroup(4, 4), HeadGroup(4, 4), HeadGroup(8, 4)),
        ),
        Plane("target", 0, "recurrent", Kept.PER_REQUEST, (8, 33, 8), "float32", 0, (HeadGroup(8, 1),)),
        Plane("target", 1, "conv", Kept.PER_REQUEST, (64, 3), "bfloat16", 0, (HeadGroup(16, 4),)),
    ),
)
SIZES = [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (1, 8)]


def pairs(src_size: int, dst_size: int) -> Iterator[PairPlan]:
    """Yield the plan of every pair of ranks that exchange bytes."""
    for src in range(src_size):
        for dst in range(dst_size):
            plan = pair_plan(layout_of(7, 4, src, src_size), layout_of(9, 5, dst, dst_size))
            if plan.state or any(plan.planes):
                yield plan


def noisy_pool(layout: PoolLayout, seed: int) -> Tensor:
    """Return the flat bytes of a pool on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (layout.total_bytes,), dtype=torch.uint8, generator=generator)


def layout_of(pages: int, slots: int, rank: int, size: int) -> PoolLayout:
    return PoolLayout(
        fingerprint="m", spec=SPEC, num_pages=pages, num_slots=slots, tp_rank=rank, tp_size=size
    )
