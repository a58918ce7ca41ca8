"""Rows that the ranks of a node exchange through memory that all of their GPUs map: sums, norms of them, and copies.

One kernel does all of it (one-shot all-reduce): the program of a row writes it to its own rank's memory, tells the
other ranks, waits until they have told it, and adds up the row of every rank in the order of the ranks, or copies
them. No other program takes part, so a row never waits for another row.

A row has two places, which its turns use alternately. A rank writes to a place again two turns later. Before that, in
the turn between, it was told by every other rank, whose kernel of the turn before had then ended, and with it the
reads of that place. That holds for each row by itself, however many rows a call has. The turns lie in the memory, so
that a graph may be replayed, as long as all ranks launch the same kernels in the same order.

A program gives up waiting after a number of polls, and soon after the host has stored the number of a lost rank in
`RankMemories.host`. All results are undefined from then on, and later programs do not wait at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.rms_norm import add_rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import (
    await_previous,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

MAX_RANKS, MAX_ROWS, ROW_BYTES = 8, 64, 32 << 10
# A rank's memory: [MAX_RANKS, MAX_ROWS] int32 turns that the ranks have told it, [MAX_ROWS] int32 its own turns,
# 1 int32 that is not 0 once a program has given up, and from DATA_OFFSET on [2, MAX_ROWS, ROW_BYTES].
DATA_OFFSET = 4096
PEER_BYTES = DATA_OFFSET + 2 * MAX_ROWS * ROW_BYTES
POLLS_PER_LOOK = 256  # of another rank's turn between two looks at host memory, which take longer
GATHERED = torch.int32  # what rows are copied as
LEAST_WORDS = 128  # of a copied row; more rows than are needed only add programs


class RankMemories(NamedTuple):
    """The memory of all ranks, as kernels of one rank see it; zeros at first, PEER_BYTES each."""

    addresses: (
        Tensor  # [ranks] int64 on the device: where this rank has mapped the memory of each, its own included
    )
    # [2] int32 that the host can read and write: 1 + the rank for which a program has given up, 1 + a rank for which
    # nothing may wait any longer
    host: Tensor
    rank: int
    polls: int  # how often a program looks for another rank's turn before it gives up and computes nonsense

    def holds(self, rows: Tensor) -> bool:
        """Return whether rows [n, H] fit into the places."""
        return rows.shape[0] <= MAX_ROWS and rows.shape[1] * rows.itemsize <= ROW_BYTES


def peer_sum_reference(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' rows, in their order, in float32 until it is rounded to the dtype of the rows."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def peer_sum_rms_norm_reference(
    parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual) for y = peer_sum(parts)."""
    return add_rms_norm_reference(peer_sum_reference(parts), residual, weight, eps)


@kernel
def _own_place(own, row, ROWS: tl.constexpr, PLACE: tl.constexpr, COUNTS: tl.constexpr, DATA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (the next turn of a row, the offset of its place in the memory of every rank)."""
    turn = tl.load(own.to(tl.pointer_type(tl.int32)) + COUNTS * ROWS + row) + 1
    return turn, DATA + ((turn & 1) * ROWS + row).to(tl.int64) * PLACE


@kernel
def _meet(  # type: ignore[no-untyped-def]
    addresses_ptr,
    host_ptr,
    own,
    row,
    turn,
    rank,
    polls,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTS: tl.constexpr,
    LOOK: tl.constexpr,
):
    """Tell the other ranks that the row of this rank is in its place, and wait until theirs are."""
    turns = own.to(tl.pointer_type(tl.int32))
    given_up = turns + (COUNTS + 1) * ROWS
    left = tl.where(tl.load(given_up) == 0, polls, 0)
    # All threads have written before one of them tells the others, and have read the turn before one of them sets it.
    tl.debug_barrier()
    tl.store(turns + COUNTS * ROWS + row, turn)
    for peer in tl.static_range(RANKS):
        theirs = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * ROWS + row, turn, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        seen = tl.atomic_add(turns + peer * ROWS + row, 0, sem="acquire", scope="sys")
        while (seen - turn < 0) & (left > 0):  # a difference, since turns overflow
            seen = tl.atomic_add(turns + peer * ROWS + row, 0, sem="acquire", scope="sys")
            left -= 1
            if left % LOOK == 0:
                left = tl.where(tl.load(host_ptr + 1, volatile=True) == 0, left, 0)
        if seen - turn < 0:
            tl.store(host_ptr, peer + 1)
            tl.store(given_up, 1)
    tl.debug_barrier()  # no thread reads before all ranks have told one of them


@kernel_with_varying("rank", "polls")
def _peer_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size] of this rank
    residual_ptr,  # [rows, size]; read if NORM
    weight_ptr,  # [size]; read if NORM
    out_ptr,  # [rows, size]: the sum, or if NORM the normed rows
    total_ptr,  # [rows, size]; written if NORM
    addresses_ptr,  # [RANKS] int64
    host_ptr,  # [2] int32
    x_stride,
    residual_stride,
    size,
    eps,
    rank,
    polls,
    RANKS: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,  # MAX_ROWS
    PLACE: tl.constexpr,  # ROW_BYTES
    COUNTS: tl.constexpr,  # MAX_RANKS
    DATA: tl.constexpr,  # DATA_OFFSET
    LOOK: tl.constexpr,  # POLLS_PER_LOOK
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, which is kept in registers as a whole."""
    await_previous(CHAINED)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    live = column < size
    own = tl.load(addresses_ptr + rank)
    turn, place = _own_place(own, row, ROWS, PLACE, COUNTS, DATA)
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=live, other=0.0)
    mine = tl.multiple_of((own + place).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    tl.store(mine + column, x, mask=live)
    _meet(addresses_ptr, host_ptr, own, row, turn, rank, polls, RANKS, ROWS, COUNTS, LOOK)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = (tl.load(addresses_ptr + peer) + place).to(tl.pointer_type(x_ptr.dtype.element_ty))
        part = tl.multiple_of(theirs, 16) + column
        total += tl.load(part, mask=live, other=0.0, volatile=True).to(tl.float32)
    x = total.to(out_ptr.dtype.element_ty)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row.to(tl.int64) * residual_stride + column, mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + column, x, mask=live)
        x = normed_row(x, weight, size, eps, weight_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, x, mask=live)


@kernel_with_varying("rank", "polls", "words")
def _peer_gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [words] int32 of this rank
    out_ptr,  # [RANKS, words] int32
    addresses_ptr,  # [RANKS] int64
    host_ptr,  # [2] int32
    words,
    rank,
    polls,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,  # MAX_ROWS
    PLACE: tl.constexpr,  # ROW_BYTES
    COUNTS: tl.constexpr,  # MAX_RANKS
    DATA: tl.constexpr,  # DATA_OFFSET
    LOOK: tl.constexpr,  # POLLS_PER_LOOK
    BLOCK: tl.constexpr,  # words of a row
    CHAINED: tl.constexpr,
):
    """One program per row of BLOCK words, of which the last one may have fewer."""
    await_previous(CHAINED)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    word = row * BLOCK + column
    live = word < words
    own = tl.load(addresses_ptr + rank)
    turn, place = _own_place(own, row, ROWS, PLACE, COUNTS, DATA)
    mine = tl.multiple_of((own + place).to(tl.pointer_type(tl.int32)), 16)
    tl.store(mine + column, tl.load(x_ptr + word, mask=live, other=0), mask=live)
    _meet(addresses_ptr, host_ptr, own, row, turn, rank, polls, RANKS, ROWS, COUNTS, LOOK)
    for peer in tl.static_range(RANKS):
        theirs = tl.multiple_of((tl.load(addresses_ptr + peer) + place).to(tl.pointer_type(tl.int32)), 16)
        part = tl.load(theirs + column, mask=live, other=0, volatile=True)
        tl.store(out_ptr + peer * words + word, part, mask=live)


def peer_sum_triton(x: Tensor, memory: RankMemories) -> Tensor:
    """Return the sum of x [..., H] over the ranks; of rows that `memory` does not hold, piece by piece."""
    rows = x.flatten(0, -2)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if memory.holds(rows):
        _launch(rows, rows, rows, out, out, 0.0, memory, norm=False)
        return out
    size, given, sums = ROW_BYTES // x.itemsize, rows.reshape(-1), out.view(-1)
    for start, stop in _pieces(x.numel(), MAX_ROWS * size):
        # Rows of full size, and what is left as a row of its own.
        middle = start + (stop - start) // size * size
        for begin, end, width in ((start, middle, size), (middle, stop, stop - middle)):
            if end > begin:
                part = given[begin:end].view(-1, width)
                # One kernel for all widths, since prompts of any length are embedded.
                _launch(part, part, part, sums[begin:end], sums, 0.0, memory, norm=False, widest=size)
    return out


def peer_gather_triton(x: Tensor, memory: RankMemories) -> Tensor:
    """Return the x of all ranks, which are alike, as [ranks, *x.shape]."""
    ranks, flat = len(memory.addresses), x.contiguous().view(-1).view(torch.uint8)
    if not len(flat):
        return x.new_empty(ranks, *x.shape)
    words = -(-len(flat) // GATHERED.itemsize)
    if len(flat) % GATHERED.itemsize or flat.data_ptr() % GATHERED.itemsize:
        flat = F.pad(flat, (0, words * GATHERED.itemsize - len(flat)))
    given = flat.view(GATHERED)
    parts = [_gather(given[start:stop], memory) for start, stop in _pieces(words, MAX_ROWS * ROW_BYTES // 4)]
    joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
    return joined.view(torch.uint8)[:, : x.nbytes].contiguous().view(x.dtype).view(ranks, *x.shape)


def _pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of at most `most` of `total` elements each."""
    for start in range(0, total, most):
        yield start, min(start + most, total)


def peer_sum_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: RankMemories
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual) for the sum y of x over the ranks; all [..., H]."""
    assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
    assert weight.shape == (x.shape[-1],), f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x.flatten(0, -2), residual.flatten(0, -2), weight, out, total, eps, memory, norm=True)
    return out, total


def _launch(
    rows: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    memory: RankMemories,
    norm: bool,
    widest: int = 0,
) -> None:
    """Sum rows [count, size] by a kernel for rows of up to `widest` values; 0: for rows of this size."""
    count, size = rows.shape
    ranks = len(memory.addresses)
    assert memory.holds(rows), f"{count} rows of {size} do not fit into the ranks' memory"
    assert 0 <= memory.rank < ranks <= MAX_RANKS, f"rank {memory.rank} of {ranks}"
    assert rows.stride(1) == residual.stride(1) == 1, "the elements of a row must be adjacent"
    if count == 0:
        return
    block = next_power_of_2(widest or size)
    _peer_sum_kernel[(count,)](
        rows,
        residual,
        weight,
        out,
        total,
        memory.addresses,
        memory.host,
        rows.stride(0),
        residual.stride(0),
        size,
        eps,
        memory.rank,
        memory.polls,
        RANKS=ranks,
        NORM=norm,
        ROWS=MAX_ROWS,
        PLACE=ROW_BYTES,
        COUNTS=MAX_RANKS,
        DATA=DATA_OFFSET,
        LOOK=POLLS_PER_LOOK,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(rows.device),
    )


def _gather(words: Tensor, memory: RankMemories) -> Tensor:
    """Return [ranks, n] of the words [n] of all ranks, which `memory` holds."""
    count, ranks = len(words), len(memory.addresses)
    out = words.new_empty(ranks, count)
    block = max(next_power_of_2(-(-count // MAX_ROWS)), LEAST_WORDS)
    _peer_gather_kernel[(-(-count // block),)](
        words,
        out,
        memory.addresses,
        memory.host,
        count,
        memory.rank,
        memory.polls,
        RANKS=ranks,
        ROWS=MAX_ROWS,
        PLACE=ROW_BYTES,
        COUNTS=MAX_RANKS,
        DATA=DATA_OFFSET,
        LOOK=POLLS_PER_LOOK,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(words.device),
    )
    return out
