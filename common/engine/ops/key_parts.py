"""Attention whose keys are divided among programs (flash-decoding): the number of parts, and their sum.

The sum of few parts is computed by the last program of a tile to end, that of more parts by a kernel of its own, whose
many programs read them faster than one does (H200: tests/bench/NOTES.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.ended_programs import MAX_TILES, ended_programs
from common.engine.ops.part_plan import FIELDS, GRANULE, places_in, places_of, plan_parts
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

BLOCK_KEYS = 64  # keys per step of a part
MAX_SPLITS = 32
MEASURED_HEAD_BYTES = 256  # one head of one token: bf16, D 128
PROGRAMS_PER_PROCESSOR = 3
# Over pages in eight bits, for fewer programs than the first number: programs per processor, keys per step, stages.
EIGHT_BITS_DIVISIONS = ((16, 2, 64, 5), (64, 2, 64, 4), (256, 3, 64, 5), (397, 1, 128, 3))
MAX_COMBINED = 48  # rows of a tile times parts that its last program adds up
ROWS_TOGETHER, MAX_TOGETHER = 64, 8  # rows times parts, and parts, that it reads at once
SHORT_STEPS = 16  # the least number of programs and the most rows of a tile with steps of one block


class Division(NamedTuple):
    """The division of a request's keys into parts."""

    splits: int
    keys: int  # per step
    stages: int

    def is_combined(self, rows: int) -> bool:
        """Return whether the last program of a tile of `rows` rows adds up its parts.

        That also holds if requests have one part unless they are longer than others.
        """
        return self.splits <= max(MAX_COMBINED // rows, 1)

    def plan(
        self, seq_lens: Tensor, max_keys: int, kept_out: int = 0, window: int | None = None
    ) -> Tensor | None:
        """Return the plan of a batch's parts (`plan_parts`); None for one request, whose parts are alike.

        Args:
            max_keys: upper bound of a request's keys.
        """
        requests = len(seq_lens)
        if requests == 1:
            return None
        places = places_of(requests, self.splits, max_keys, self.keys)
        return plan_parts(seq_lens, self.splits, places, self.keys, kept_out, window)


def choose_division(programs: int, rows: int, max_keys: int, head_bytes: int, processors: int) -> Division:
    """Choose from host bounds only, so that a graph's grid serves every length.

    Up to three programs per processor, each loading as many keys at once as shared memory holds, are better than more
    programs. Fewer keys at once are better if there are more programs even without a division, or many parts of few
    rows (H200: tests/bench/NOTES.md).

    Args:
        programs: their number without splits.
        rows: tokens times query heads of one KV head in one tile.
    """
    most = PROGRAMS_PER_PROCESSOR * processors
    splits = max(1, min(most // programs, cdiv(max_keys, BLOCK_KEYS), MAX_SPLITS))
    if head_bytes > MEASURED_HEAD_BYTES:
        return Division(splits, BLOCK_KEYS, 2)
    wide = Division(splits, 2 * BLOCK_KEYS, 2)
    several = splits > 1 and programs >= SHORT_STEPS >= rows and not wide.is_combined(rows)
    return Division(splits, BLOCK_KEYS, 3) if programs > most or several else wide


def choose_eight_bits_division(
    programs: int, rows: int, max_keys: int, head_bytes: int, processors: int
) -> Division:
    """Do as `choose_division` for verification over pages in eight bits (H200: tests/bench/NOTES.md).

    More programs than were measured, and larger heads, take the division of wider pages.
    """
    for limit, per_processor, keys, stages in EIGHT_BITS_DIVISIONS:
        if programs < limit and head_bytes <= MEASURED_HEAD_BYTES:
            most = per_processor * processors // programs
            return Division(max(1, min(most, cdiv(max_keys, BLOCK_KEYS), MAX_SPLITS)), keys, stages)
    return choose_division(programs, rows, max_keys, head_bytes, processors)


@kernel
def keys_of_part(  # type: ignore[no-untyped-def]
    begin, end, split, splits, granules, PLANNED: tl.constexpr, GRANULE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the first key of part `split` of keys begin .. end - 1, the one after its last, and the number of parts.

    There is always one part. Those past the last one begin at or after `end`.

    Args:
        granules: of a part, if PLANNED. Otherwise there are up to `splits` parts, of at least one step of keys.
    """
    # The compiler has to see that a part is a multiple of GRANULE, which BLOCK_N is.
    if PLANNED:
        part = granules * GRANULE
    else:
        part = tl.maximum(tl.cdiv(tl.cdiv(end - begin, splits), GRANULE), BLOCK_N // GRANULE) * GRANULE
    used = tl.maximum(tl.cdiv(end - begin, part), 1)
    begin += split * part
    return begin, tl.minimum(begin + part, end), used


@kernel
def store_part(  # type: ignore[no-untyped-def]
    result,  # [ROWS, BLOCK_D] float32, whose column i is column dim[i] of the output
    lse,  # [ROWS] float32, base 2; -inf: the row sees none of this part's keys
    # These two follow from `base`, `first` and `count`. The callers have them already: computed again here, they cost
    # some kernels up to 17 registers.
    line,  # [ROWS], rows of the output: base + (row // GROUP) * HEADS + row % GROUP
    live,  # [ROWS] bool: row < count
    dim,  # [BLOCK_D]
    base,  # int64: the row of the output of the first token's first head of this KV head
    first,  # the first of the tile's rows, which are tokens times GROUP heads
    count,  # such rows in all
    split,
    used,  # parts that have keys, at least 1: the first ones
    shift,  # int64: from a line to the same one of the request's first part
    lines,  # rows of the output of one request
    out_ptr,  # [B * lines, D]
    part_ptr,  # [places, lines, D] float32; used if SPLIT
    lse_ptr,  # [places, lines] float32; used if SPLIT
    ended_ptr,  # int32: programs of this tile that have ended; zero before and after; used if COMBINED
    SPLIT: tl.constexpr,  # a request may have more than one part
    COMBINED: tl.constexpr,  # the tile's last program adds up the parts
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIVE_ROWS: tl.constexpr,  # of a tile, without the padding for the matrix units
    TOGETHER: tl.constexpr,  # parts that are read at once
):
    """End a program of attention: store the result, or that of a part, and the sum of all parts if it is the last."""
    stored = live[:, None] & (dim < D)[None, :]
    whole = out_ptr + line[:, None] * D + dim[None, :]
    place = line + shift + split * lines
    if not SPLIT:
        tl.store(whole, result.to(out_ptr.dtype.element_ty), mask=stored)
    elif not COMBINED:
        tl.store(lse_ptr + place, lse, mask=live)
        tl.store(part_ptr + place[:, None] * D + dim[None, :], result, mask=stored & (split < used))
    elif used == 1:
        tl.store(whole, result.to(out_ptr.dtype.element_ty), mask=stored & (split == 0))
    elif split < used:
        tl.store(lse_ptr + place, lse, mask=live)
        tl.store(part_ptr + place[:, None] * D + dim[None, :], result, mask=stored)
        tl.debug_barrier()  # all threads have stored before one of them counts this program
        ended = tl.atomic_add(ended_ptr, 1, sem="acq_rel")
        if ended == used - 1:
            tl.store(ended_ptr, 0)
            _add_parts(
                *(base, first, count, used, shift, lines, out_ptr, part_ptr, lse_ptr),
                *(HEADS, GROUP, D, LIVE_ROWS, BLOCK_D, TOGETHER),
            )


@kernel
def _add_parts(  # type: ignore[no-untyped-def]
    base, first, count, used, shift, lines, out_ptr, part_ptr, lse_ptr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a tile. Other multiprocessors wrote them, so no cache of this one is read."""
    row, dim = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    line = base + (row // GROUP) * HEADS + row % GROUP
    live = row < count
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for begin in range(0, used, TOGETHER):
        for each in tl.static_range(TOGETHER):
            place = line + shift + (begin + each) * lines
            there = live & (begin + each < used)
            read = there[:, None] & (dim < D)[None, :]
            lse = tl.load(lse_ptr + place, mask=there, other=float("-inf"), cache_modifier=".cg")
            part = part_ptr + place[:, None] * D + dim[None, :]
            part = tl.load(part, mask=read, other=0.0, cache_modifier=".cg")
            new_most = tl.maximum(most, lse)
            finite = tl.where(new_most == float("-inf"), 0.0, new_most)
            weight, shrink = tl.exp2(lse - finite), tl.exp2(most - finite)
            total = total * shrink + weight
            out = out * shrink[:, None] + part * weight[:, None]
            most = new_most
    out /= tl.where(total > 0.0, total, 1.0)[:, None]
    whole = out_ptr + line[:, None] * D + dim[None, :]
    tl.store(whole, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dim < D)[None, :])


@kernel_with_varying("splits", "lines")
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_ptr,  # [places, lines, D] float32
    lse_ptr,  # [places, lines] float32
    firsts_ptr,  # [B + 1]: the places of the requests' first parts; not read unless PLANNED
    out_ptr,  # [B * lines, D]
    splits,
    lines,
    D: tl.constexpr,
    PLANNED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    line = tl.program_id(0).to(tl.int64)
    request = line // lines
    if PLANNED:
        first = tl.load(firsts_ptr + request)
        used = tl.load(firsts_ptr + request + 1) - first
    else:
        first, used = request * splits, splits
    place = line + (first - request) * lines
    part, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    out = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, used, BLOCK_S):
        read = place + (start + part) * lines
        lse = tl.load(lse_ptr + read, mask=start + part < used, other=float("-inf"))
        new_most = tl.maximum(most, tl.max(lse, axis=0))
        finite = tl.where(new_most == float("-inf"), 0.0, new_most)
        weight, shrink = tl.exp2(lse - finite), tl.exp2(most - finite)
        live = (lse > float("-inf"))[:, None] & (dim < D)[None, :]
        values = tl.load(part_ptr + read[:, None] * D + dim[None, :], mask=live, other=0.0)
        total = total * shrink + tl.sum(weight, axis=0)
        out = out * shrink + tl.sum(values * weight[:, None], axis=0)
        most = new_most
    out /= tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + line * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)


class KeyParts:
    """Room for the parts of one call of attention: each part's output, and the base-2 log of its sum.

    Attributes:
        places: the parts for which the grid has room.
        lines: rows of the output of one request.
        arguments: of `store_part` from part_ptr on; the last one is that of the first tile.
        constants: of the attention kernel.
    """

    def __init__(
        self, tiles: int, rows: int, division: Division, requests: int, plan: Tensor | None, out: Tensor
    ) -> None:
        """Make room for the parts of some tiles.

        Args:
            tiles: of all requests. With more than MAX_TILES, programs are not counted, and a kernel adds up all parts.
            rows: tokens times query heads of one KV head in one tile.
            plan: of `division` for these requests; without one they all have as many parts.
            out: [T, heads, D].
        """
        self.lines = out[..., 0].numel() // requests
        self.places = requests * division.splits if plan is None else places_in(plan, requests)
        self._splits, self._plan, self._out = division.splits, plan, out
        split = self.places > requests
        combined = split and tiles <= MAX_TILES and division.is_combined(rows)
        self._added_up = combined or not split
        self.arguments = out, out, out  # not used without parts
        if split:
            shape = self.places, self.lines
            outputs = torch.empty((*shape, out.shape[2]), dtype=torch.float32, device=out.device)
            lse = torch.empty(shape, dtype=torch.float32, device=out.device)
            self.arguments = outputs, lse, ended_programs(out.device) if combined else lse
        live_rows = next_power_of_2(rows)
        self.constants = {
            "PLANNED": plan is not None,
            "FIELDS": FIELDS,
            "SPLIT": split,
            "COMBINED": combined,
            "GRANULE": GRANULE,
            "LIVE_ROWS": live_rows,
            "TOGETHER": max(1, min(MAX_TOGETHER, ROWS_TOGETHER // live_rows)) if combined else 1,
        }

    def combine(self) -> None:
        """Add up the parts that the attention kernel has not. A line without any part becomes zero."""
        if self._added_up:
            return
        outputs, lse, _ = self.arguments
        head_dim = self._out.shape[-1]
        _combine_kernel[(self._out[..., 0].numel(),)](
            outputs,
            lse,
            lse if self._plan is None else self._plan[self.places * FIELDS :],
            self._out,
            self._splits,
            self.lines,
            D=head_dim,
            PLANNED=self._plan is not None,
            BLOCK_S=next_power_of_2(self._splits),
            BLOCK_D=max(next_power_of_2(head_dim), 16),
            num_warps=2,
            **chained(self._out.device),
        )
