"""Attention whose keys are divided among programs (flash-decoding): the number of parts, and their combination."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

BLOCK_KEYS = 64  # keys per step of a part
GRANULE = 16  # parts are multiples of this many keys
MAX_SPLITS = 32
MEASURED_HEAD_BYTES = 256  # one head of one token: bf16, D 128
PROGRAMS_PER_PROCESSOR = 3
# Over pages in eight bits, for fewer programs than the first number: programs per processor, keys per step, stages.
EIGHT_BITS_DIVISIONS = ((16, 2, 64, 5), (64, 2, 64, 4), (256, 3, 64, 5), (397, 1, 128, 3))
SPREAD_PROGRAMS = 256  # from which values in eight bits are multiplied in the order of `spread_columns`
LOG2_E = 1.4426950408889634


class Division(NamedTuple):
    """The division of a request's keys into parts."""

    splits: int
    keys: int  # per step
    stages: int


def choose_division(programs: int, max_keys: int, head_bytes: int, processors: int) -> Division:
    """Choose from host bounds only, so that a graph's grid serves every length. `programs`: their number without
    splits.

    Up to three programs per processor, each loading as many keys at once as shared memory holds, are better than more
    programs; if there are more even without a division, loading fewer at once is better (H200: tests/bench/NOTES.md).
    """
    most = PROGRAMS_PER_PROCESSOR * processors
    splits = max(1, min(most // programs, cdiv(max_keys, BLOCK_KEYS), MAX_SPLITS))
    if head_bytes > MEASURED_HEAD_BYTES:
        return Division(splits, BLOCK_KEYS, 2)
    return Division(splits, 2 * BLOCK_KEYS, 2) if programs <= most else Division(1, BLOCK_KEYS, 3)


def choose_eight_bits_division(programs: int, max_keys: int, head_bytes: int, processors: int) -> Division:
    """Do as `choose_division` for verification over pages in eight bits (H200: tests/bench/NOTES.md).

    More programs than were measured, and larger heads, take the division of wider pages.
    """
    for limit, per_processor, keys, stages in EIGHT_BITS_DIVISIONS:
        if programs < limit and head_bytes <= MEASURED_HEAD_BYTES:
            most = per_processor * processors // programs
            return Division(max(1, min(most, cdiv(max_keys, BLOCK_KEYS), MAX_SPLITS)), keys, stages)
    return choose_division(programs, max_keys, head_bytes, processors)


@kernel_with_varying("splits")
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_ptr,  # [lines, splits, D] float32
    lse_ptr,  # [lines, splits] float32
    out_ptr,  # [lines, D]
    splits,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    line = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + line * splits + split, mask=split < splits, other=float("-inf"))
    most = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(most == float("-inf"), 0.0, most))
    live = (lse > float("-inf"))[:, None] & (dim < D)[None, :]
    part = tl.load(part_ptr + (line * splits + split)[:, None] * D + dim[None, :], mask=live, other=0.0)
    total = tl.sum(weight, axis=0)
    out = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + line * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)


class KeyParts:
    """Partial results of the programs of one call, for `combine`: each part's output and the base-2 log of its sum.

    A single part needs neither: it writes the result itself.
    """

    def __init__(self, lines: int, splits: int, out: Tensor) -> None:
        """`lines` is the number of rows of `out` times heads; `out` is [..., D], contiguous."""
        self.splits = splits
        self.out = out
        self.lines = lines
        self.outputs, self.lse = out, out
        if splits > 1:
            shape = (lines, splits, out.shape[-1])
            self.outputs = torch.empty(shape, dtype=torch.float32, device=out.device)
            self.lse = torch.empty(shape[:2], dtype=torch.float32, device=out.device)

    def combine(self) -> None:
        """Add up the parts. A part with lse -inf is empty and not read; a line without any part becomes zero."""
        if self.splits == 1:
            return
        head_dim = self.out.shape[-1]
        _combine_kernel[(self.lines,)](
            self.outputs,
            self.lse,
            self.out,
            self.splits,
            D=head_dim,
            BLOCK_S=next_power_of_2(self.splits),
            BLOCK_D=max(next_power_of_2(head_dim), 16),
            num_warps=2,
            **chained(self.out.device),
        )
