"""Pairs of a token and an expert, grouped by expert: a counting sort on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import await_previous, chained, kernel_with_varying, next_power_of_2, tl

BLOCK = 8192


def group_pairs_reference(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return (starts [count + 1], pairs [P]) int32 for experts [P] int32.

    pairs[starts[e] : starts[e + 1]] are the indices of expert e in `experts`, ascending. Values of `pairs` from
    starts[count] on are undefined: negative experts are in no group.
    """
    sizes = experts[experts >= 0].bincount(minlength=count)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    pairs = experts.argsort(stable=True)[len(experts) - int(starts[-1]) :]
    return starts.int(), torch.cat([pairs, pairs.new_zeros(len(experts) - len(pairs))]).int()


@kernel_with_varying("total")
def _group_pairs_kernel(  # type: ignore[no-untyped-def]
    experts_ptr,  # [total]
    starts_ptr,  # [experts + 1]
    pairs_ptr,  # [total]
    total,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per expert: it counts the pairs of smaller experts, then lists its own."""
    await_previous(CHAINED)
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, total, BLOCK):
        found = tl.load(experts_ptr + start + index, mask=start + index < total, other=-1)
        smaller += ((found >= 0) & (found < expert)).to(tl.int32)
        own += (found == expert).to(tl.int32)
    at = tl.sum(smaller, axis=0)
    end = at + tl.sum(own, axis=0)
    tl.store(starts_ptr + expert + 1, end)
    if expert == 0:
        tl.store(starts_ptr, 0)
    if end > at:
        for start in range(0, total, BLOCK):
            found = tl.load(experts_ptr + start + index, mask=start + index < total, other=-1)
            mine = (found == expert).to(tl.int32)
            tl.store(pairs_ptr + at + tl.cumsum(mine, axis=0) - 1, start + index, mask=mine > 0)
            at += tl.sum(mine, axis=0)


def group_pairs_triton(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    total = experts.shape[0]
    assert experts.dtype == torch.int32 and experts.is_contiguous(), "experts are int32 in a row"  # noqa: PT018
    starts = experts.new_empty(count + 1)
    pairs = torch.empty_like(experts)
    block = min(BLOCK, max(next_power_of_2(total), 128))
    _group_pairs_kernel[(count,)](
        experts, starts, pairs, total, BLOCK=block, num_warps=block // 512 or 1, **chained(experts.device)
    )
    return starts, pairs
