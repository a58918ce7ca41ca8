"""Attention whose keys are divided among programs (flash-decoding): how many parts, and what puts them together."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    multiprocessors,
    next_power_of_2,
    tl,
)

BLOCK_KEYS = 64  # of one step of a part
GRANULE = 16  # parts are multiples of it
MAX_SPLITS = 32
MEASURED_HEAD_BYTES = 256  # one head of one token: bf16, D 128
LOG2_E = 1.4426950408889634
PROGRAMS_PER_PROCESSOR = 4  # at most: a few more would be a last wave of their own (measured on an H200)
LINES_AT_ONCE = 16  # put together by one program


def choose_splits(batch: int, kv_heads: int, max_keys: int, processors: int) -> int:
    """Parts of a request's keys, from host bounds alone, so that a graph's grid serves every length."""
    wanted = PROGRAMS_PER_PROCESSOR * processors // (batch * kv_heads)
    return max(1, min(wanted, cdiv(max_keys, BLOCK_KEYS), MAX_SPLITS))


class Division(NamedTuple):
    """How a request's keys are divided."""

    splits: int
    keys: int  # of a step
    stages: int


def choose_division(programs: int, max_keys: int, head_bytes: int, processors: int) -> Division:
    """From host bounds alone. `programs`: without splits. Two to a processor, each with as many keys on the way as
    shared memory holds, are better than more of them: measured on an H200."""
    splits = max(1, min(2 * processors // programs, cdiv(max_keys, BLOCK_KEYS), 16))
    if head_bytes > MEASURED_HEAD_BYTES:
        return Division(splits, BLOCK_KEYS, 2)
    return Division(splits, 2 * BLOCK_KEYS, 2) if splits > 1 else Division(1, BLOCK_KEYS, 3)


def arrivals_of(device: torch.device | str) -> Tensor:
    """Zeros that the programs of a call count themselves in: as many as a call whose keys are divided can need.

    A call leaves zeros behind. So calls that share it must follow one another on one stream, and it must live as long
    as any graph that has captured one. Made outside graphs: a capture would fill it anew in each replay.
    """
    processors = multiprocessors(torch.device(device))
    return torch.zeros(PROGRAMS_PER_PROCESSOR * processors, dtype=torch.int32, device=device)


@kernel
def put_together(  # type: ignore[no-untyped-def]
    part_ptr,  # [all lines, splits, D] float32
    lse_ptr,  # [all lines, splits] float32
    out_ptr,  # [all lines, D]
    line,  # [LINES] int64
    live,  # [LINES] bool
    splits,
    filled,  # parts behind these are empty
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINES: tl.constexpr,
    STEP: tl.constexpr,
):
    """STEP parts are on their way at a time and added in their order: bits depend on STEP, not on LINES or `filled`."""
    dim = tl.arange(0, BLOCK_D)
    inside, bound = live[:, None] & (dim < D)[None, :], tl.where(live, filled, 0)
    most = tl.full((LINES,), float("-inf"), tl.float32)
    total = tl.zeros((LINES, 1), tl.float32)
    out = tl.zeros((LINES, BLOCK_D), tl.float32)
    for first in range(0, filled, STEP):
        # .cg: past L1, which is not kept up to date with what other multiprocessors store
        place = line * splits + first
        new_most = most
        for step in tl.static_range(STEP):
            read = first + step < bound
            lse = tl.load(lse_ptr + place + step, mask=read, other=float("-inf"), cache_modifier=".cg")
            new_most = tl.maximum(new_most, lse)
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        shrink = tl.exp2(most - shift)[:, None]
        total, out, most = total * shrink, out * shrink, new_most
        for step in tl.static_range(STEP):
            read = first + step < bound
            lse = tl.load(lse_ptr + place + step, mask=read, other=float("-inf"), cache_modifier=".cg")
            part_place = part_ptr + (place + step)[:, None] * D + dim[None, :]
            part = tl.load(part_place, mask=inside & read[:, None], other=0.0, cache_modifier=".cg")
            part = tl.where((lse == float("-inf"))[:, None], 0.0, part)  # an empty one was not written
            weight = tl.exp2(lse - shift)[:, None]
            total += weight
            out = tl.fma(part, weight, out)
    out = out / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + line[:, None] * D + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def lines_of_last(arrivals_ptr, group, programs, lines):  # type: ignore[no-untyped-def]
    """`lines` for the last of `programs` programs of `group` to come here, which sees all that they stored; else 0.

    The barrier stands between the stores of all threads and the one thread that counts: so its release covers them,
    and its acquire what all threads load behind the second barrier.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = arrived == programs - 1
    tl.store(arrivals_ptr + group, 0, mask=last)  # for the next call, which waits for the end of this one
    return tl.where(last, lines, 0)


@kernel_with_varying("splits")
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_ptr,  # [lines, splits, D] float32
    lse_ptr,  # [lines, splits] float32
    out_ptr,  # [lines, D]
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    line, live = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.full((1,), True, tl.int1)
    put_together(part_ptr, lse_ptr, out_ptr, line, live, splits, splits, D, BLOCK_D, 1, STEP)


class KeyParts:
    """What the programs of one call leave to be put together: each part's output and the base-2 log of its sum.

    A part with lse -inf is empty and not used; a line without any part comes out as zero. One part alone needs none of
    it: it writes the result itself.
    """

    def __init__(
        self, out: Tensor, splits: int, programs: int, rows: int, values: int, arrivals: Tensor | None
    ) -> None:
        """With `arrivals` (see `arrivals_of`) the last program of a group does it, else `combine`.

        Args:
            out: [..., heads, D], contiguous.
            programs: of each part; those that have the same rows in all parts are a group.
            rows: lines of `out` that one program has parts of, at most.
            values: of parts on their way to one program; 64 for each of its registers that they may take.
        """
        self.splits = splits
        self.out = out
        self.lines = out[..., 0].numel()
        self.outputs, self.lse, self.arrivals = out, out, None
        self._block_lines = min(next_power_of_2(rows), LINES_AT_ONCE)
        self._block_d = max(next_power_of_2(out.shape[-1]), 16)
        self._step = max(1, min(values // (self._block_lines * self._block_d), next_power_of_2(splits)))
        if splits > 1:
            self.outputs = out.new_empty(self.lines, splits, out.shape[-1], dtype=torch.float32)
            self.lse = out.new_empty(self.lines, splits, dtype=torch.float32)
            self.arrivals = arrivals
        if self.arrivals is not None:
            assert programs <= len(self.arrivals), (
                f"{programs} programs of a part, {len(self.arrivals)} counts"
            )

    def options(self) -> dict[str, Any]:
        """Of the kernel that writes the parts."""
        return {
            "SPLIT": self.splits > 1,
            "TOGETHER": self.arrivals is not None,
            "LINES": self._block_lines,
            "STEP": self._step,
        }

    def combine(self) -> None:
        """What the launch before has left to a launch of its own."""
        if self.splits == 1 or self.arrivals is not None:
            return
        _combine_kernel[(self.lines,)](
            self.outputs,
            self.lse,
            self.out,
            self.splits,
            D=self.out.shape[-1],
            BLOCK_D=self._block_d,
            STEP=self._step,
            num_warps=2,
            **chained(self.out.device),
        )
