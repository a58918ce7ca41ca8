"""Sums of many rows over the ranks of a node: a kernel that sends rows while it adds up earlier ones.

A fixed number of programs share the rows. Each writes a row into the memory of every other rank, and then its count
of rows, before it adds up the row before that one. So rows travel while others are summed, and a program waits only
for the programs of its own number on other ranks. A GPU starts programs in the order of their numbers, so the lowest
one that has not ended runs on every rank sooner or later, even if other kernels occupy some of the multiprocessors.

Counts go on from call to call and lie in the memory, so that a graph may be replayed. Every rank makes the same
calls.

Row n of a program, counted from 0, travels through place n % WINDOW. A program sends row n + 1 and then waits until
each other rank's count is n + 1. Such a rank has sent its own row n, before which it has added up row n - 2. So
whoever sends row n + 1, with a count of n from every rank, knows that row n - 3 is not needed any more: four places
suffice.

With NCCL's kernels in graphs, CUDA lets the host launch only some 20 segments of a prompt ahead
(tests/bench/NOTES.md, "The 70B shape in FP8 over two ranks again").
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import GROUP, has_fp8, store_codes
from common.engine.ops.peer_memories import (
    COUNTS_OFFSET,
    MAX_RANKS,
    MAX_ROWS,
    PROGRAMS,
    ROW_BYTES,
    SENDER_BYTES,
    STREAM_OFFSET,
    WINDOW,
    RankMemories,
)
from common.engine.ops.peer_norm import SumNorm
from common.engine.ops.peer_words import polls_left
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import (
    await_previous,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

RARER = 16  # than a program of a few rows looks at host memory, since so many more programs may wait


@kernel
def _place(  # type: ignore[no-untyped-def]
    part, like_ptr, program, number, STREAM: tl.constexpr, WINDOW: tl.constexpr, ROW_BYTES: tl.constexpr
):
    """Return the pointer to the place of a program's row in the part of a memory to which its rank writes."""
    place = program * WINDOW + (number & (WINDOW - 1))
    first = part + STREAM + place.to(tl.int64) * ROW_BYTES
    return tl.multiple_of(first.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@kernel
def _count(part, program, COUNTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pointer to the count of a program's rows in such a part."""
    return (part + COUNTS).to(tl.pointer_type(tl.int32)) + program


@kernel
def _send(  # type: ignore[no-untyped-def]
    x_ptr, addresses_ptr, program, row, number, rank, size,
    RANKS: tl.constexpr, SENDER: tl.constexpr, COUNTS: tl.constexpr, STREAM: tl.constexpr, WINDOW: tl.constexpr,
    ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row into the memory of every other rank, and then the number of rows that this program has written."""
    column = tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row.to(tl.int64) * size + column, mask=live, other=0.0)
    for peer in tl.static_range(RANKS):
        part = tl.load(addresses_ptr + peer) + rank.to(tl.int64) * SENDER
        place = _place(part, x_ptr, program, number, STREAM, WINDOW, ROW_BYTES)
        tl.store(place + column, x, mask=live & (peer != rank))
    tl.debug_barrier()  # all threads have written before one of them counts the row
    for peer in tl.static_range(RANKS):
        part = tl.load(addresses_ptr + peer) + rank.to(tl.int64) * SENDER
        count = _count(part, program, COUNTS)
        tl.atomic_xchg(count, number + 1, mask=peer != rank, sem="release", scope="sys")


@kernel_with_varying("rows", "rank", "polls", "scale_stride", "group_stride")
def _stream_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size] of this rank
    residual_ptr,  # [rows, size]; read if NORM
    weight_ptr,  # [size]; read if NORM
    out_ptr,  # [rows, size]: the sum, or if NORM the normed rows, or if QUANTISED their codes
    scales_ptr,  # of the codes; written if QUANTISED
    total_ptr,  # [rows, size]; written if NORM
    addresses_ptr,  # [RANKS] int64
    host_ptr,  # [2] int32
    rows,
    size,
    scale_stride,
    group_stride,
    eps,
    rank,
    polls,
    RANKS: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISED: tl.constexpr,  # as FP8 codes, which takes NORM
    BLOCKS: tl.constexpr,  # a scale per 128 values, else one per row
    HARDWARE: tl.constexpr,
    GIVEN_UP: tl.constexpr,  # MAX_ROWS
    SENDER: tl.constexpr,  # SENDER_BYTES
    COUNTS: tl.constexpr,  # COUNTS_OFFSET
    STREAM: tl.constexpr,  # STREAM_OFFSET
    PROGRAMS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LOOK: tl.constexpr,  # polls between two looks at host memory
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program has the rows of its number and of every PROGRAMS-th one after it."""
    await_previous(CHAINED)
    program = tl.program_id(0)
    own = tl.load(addresses_ptr + rank)
    turns = own.to(tl.pointer_type(tl.int32))
    count = _count(own + rank.to(tl.int64) * SENDER, program, COUNTS)
    before = tl.load(count)
    left = tl.where(tl.load(turns + GIVEN_UP) == 0, polls, 0)
    column = tl.arange(0, BLOCK)
    live = column < size
    if NORM:
        weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    number = tl.cdiv(rows - program, PROGRAMS)  # of this program's rows
    _send(
        *(x_ptr, addresses_ptr, program, program, before, rank, size),
        *(RANKS, SENDER, COUNTS, STREAM, WINDOW, ROW_BYTES, BLOCK),
    )
    for index in range(number):
        row = program + index * PROGRAMS
        if index + 1 < number:
            _send(
                *(x_ptr, addresses_ptr, program, row + PROGRAMS, before + index + 1, rank, size),
                *(RANKS, SENDER, COUNTS, STREAM, WINDOW, ROW_BYTES, BLOCK),
            )
        for peer in tl.static_range(RANKS):
            if peer != rank:
                sent = _count(own + peer * SENDER, program, COUNTS)
                missing = before + index + 1 - tl.atomic_add(sent, 0, sem="acquire", scope="sys")
                while (missing > 0) & (left > 0):
                    missing = before + index + 1 - tl.atomic_add(sent, 0, sem="acquire", scope="sys")
                    left = polls_left(host_ptr, left, LOOK)
                if missing > 0:
                    tl.store(host_ptr, peer + 1)
                    tl.store(turns + GIVEN_UP, 1)
        line = row.to(tl.int64) * size + column
        x = tl.load(x_ptr + line, mask=live, other=0.0)
        y = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            place = _place(own + peer * SENDER, x_ptr, program, before + index, STREAM, WINDOW, ROW_BYTES)
            # Written by another GPU: no cache of this multiprocessor is read.
            part = tl.load(place + column, mask=live & (peer != rank), other=0.0, cache_modifier=".cg")
            y += tl.where(peer == rank, x, part).to(tl.float32)
        found = y.to(x.dtype)
        if NORM:
            residual = tl.load(residual_ptr + line, mask=live, other=0.0)
            total = (found.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + line, total, mask=live)
            found = normed_row(total, weight, size, eps, weight_ptr.dtype.element_ty)
        if QUANTISED:
            codes, scales = out_ptr + row.to(tl.int64) * size, scales_ptr + row.to(tl.int64) * scale_stride
            store_codes(found.to(tl.float32), codes, scales, group_stride, 0, size, BLOCKS, HARDWARE, BLOCK)
        else:
            tl.store(out_ptr + line, found, mask=live)
    tl.debug_barrier()  # all threads have read the count before one of them sets it
    tl.store(count, before + number)


def stream_sum(rows: Tensor, out: Tensor, memory: RankMemories, norm: SumNorm | None = None) -> None:
    """Sum rows [count, size] over the ranks into `out`, with the norm that follows; any count, up to ROW_BYTES each."""
    count, size = rows.shape
    ranks = len(memory.addresses)
    assert size * rows.itemsize <= ROW_BYTES, f"rows of {size} do not fit into the ranks' memory"
    assert 0 <= memory.rank < ranks <= MAX_RANKS, f"rank {memory.rank} of {ranks}"
    if count == 0:
        return
    rows = rows.contiguous()
    given = norm or SumNorm(rows, out, out, 0.0)
    lines = None if given.scales is None else given.scales.flatten(0, -2)
    block = next_power_of_2(size)
    _stream_kernel[(min(count, PROGRAMS),)](
        rows,
        given.residual.contiguous(),
        given.gain,
        out if lines is None else out.view(torch.uint8),
        out if lines is None else lines,
        given.total,
        memory.addresses,
        memory.host,
        count,
        size,
        0 if lines is None else lines.stride(0),
        0 if lines is None else lines.stride(1),
        given.eps,
        memory.rank,
        memory.polls,
        RANKS=ranks,
        NORM=norm is not None,
        QUANTISED=lines is not None,
        BLOCKS=given.blocks,
        HARDWARE=has_fp8(rows.device),
        GIVEN_UP=MAX_ROWS,
        SENDER=SENDER_BYTES,
        COUNTS=COUNTS_OFFSET,
        STREAM=STREAM_OFFSET,
        PROGRAMS=PROGRAMS,
        WINDOW=WINDOW,
        ROW_BYTES=ROW_BYTES,
        LOOK=RARER * memory.polls_per_look,
        BLOCK=block if lines is None else max(block, GROUP),
        # With two programs to a multiprocessor, 16 warps each would leave a thread 64 registers.
        num_warps=min(row_warps(block), max(8, block // 1024)),
        **chained(rows.device),
    )
