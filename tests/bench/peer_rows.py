"""A candidate for sums of prompts over ranks, which `all_reduce` compares with NCCL: rows in peer memory with flags.

NCCL's kernels in graphs let the host launch only some 20 segments ahead (NOTES.md, "The 70B shape in FP8 over two ranks
again"), so a kernel of our own for many rows would also shorten the launch of a prompt. A fixed number of programs, all
of which the GPU holds at once, share the rows. Each writes a row into the memory of every other rank, and a count of
its rows after it, before it adds up the row before that one. So rows travel while others are summed, and a program
waits only for the programs of its own number on other ranks. It has been tested in Triton's interpreter only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.peer_memory_group import PeerAllocator
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import (
    await_previous,
    chained,
    kernel,
    kernel_with_varying,
    multiprocessors,
    next_power_of_2,
    tl,
)

PROGRAMS_PER_PROCESSOR = 2
POLLS = 1 << 22  # some seconds
HEAD_BYTES = 1 << 16  # of a rank's memory, for the counts


class RowMemories(NamedTuple):
    """The memory of all ranks, zero at first: counts, then places [2, ranks, max_rows, size] of rows."""

    addresses: Tensor  # [ranks] int64, where this rank has mapped the memory of each
    host: Tensor  # [1] int32 that the host can read: 1 + a rank whose rows have not come
    rank: int
    polls: int  # how often a program looks for a row before it gives up
    max_rows: int
    size: int
    dtype: torch.dtype

    @classmethod
    def connect(
        cls, host: CollectiveGroup, allocator: PeerAllocator, max_rows: int, size: int, dtype: torch.dtype
    ) -> RowMemories:
        """Allocate this rank's memory on its GPU and map that of the others, which do so at the same time."""
        shard, device = host.shard, torch.cuda.current_device()
        own = allocator.malloc(device, cls.nbytes(shard.size, max_rows, size, dtype))
        handle = torch.frombuffer(bytearray(allocator.export(own)), dtype=torch.uint8)
        handles = host.all_gather(handle, shard.size * len(handle)).view(shard.size, len(handle))
        addresses = [
            own if rank == shard.rank else allocator.open(device, bytes(each.tolist()))
            for rank, each in enumerate(handles)
        ]
        failed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return cls(torch.tensor(addresses, device="cuda"), failed, shard.rank, POLLS, max_rows, size, dtype)

    @staticmethod
    def nbytes(ranks: int, max_rows: int, size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's memory."""
        return HEAD_BYTES + 2 * ranks * max_rows * size * dtype.itemsize


@kernel
def _rows_of(address, like_ptr, HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the pointer to the first row in a rank's memory."""
    return tl.multiple_of((address + HEAD).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@kernel
def _send_row(  # type: ignore[no-untyped-def]
    x_ptr, addresses_ptr, program, row, place, count, rank, size, RANKS: tl.constexpr, PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row into the memory of every other rank, and then the number of rows that this program has written."""
    column = tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row.to(tl.int64) * size + column, mask=live, other=0.0)
    for peer in tl.static_range(RANKS):
        rows = _rows_of(tl.load(addresses_ptr + peer), x_ptr, HEAD)
        tl.store(rows + (place + row) * size + column, x, mask=live & (peer != rank))
    tl.debug_barrier()  # all threads have written before one of them counts the row
    for peer in tl.static_range(RANKS):
        counts = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(
            counts + (1 + rank) * PROGRAMS + program, count, mask=peer != rank, sem="release", scope="sys"
        )


@kernel_with_varying("rows", "rank", "polls")
def _peer_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size]
    residual_ptr,  # [rows, size]
    weight_ptr,  # [size]
    out_ptr,  # [rows, size]
    total_ptr,  # [rows, size]
    addresses_ptr,  # [RANKS] int64
    host_ptr,  # [1] int32
    rows,
    size,
    max_rows,
    eps,
    rank,
    polls,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The count of a program is that of the rows of all calls, which is the same on every rank.

    Its places alternate from call to call. A rank writes to a place again two calls later, when every other rank has
    begun the call between, and so has ended the one that read it.
    """
    await_previous(CHAINED)
    program = tl.program_id(0)
    own = tl.load(addresses_ptr + rank)
    counts = own.to(tl.pointer_type(tl.int32))
    states = counts + (1 + RANKS) * PROGRAMS + program  # calls
    before, call = tl.load(counts + program), tl.load(states)
    column = tl.arange(0, BLOCK)
    live = column < size
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    parity = (call & 1) * RANKS
    mine = (parity + rank).to(tl.int64) * max_rows
    number = tl.cdiv(rows - program, PROGRAMS)  # of this program's rows, at steps of PROGRAMS
    left = polls
    if number > 0:
        _send_row(
            *(x_ptr, addresses_ptr, program, program, mine, before + 1, rank, size),
            *(RANKS, PROGRAMS, HEAD, BLOCK),
        )
    for index in range(number):
        row = program + index * PROGRAMS
        if index + 1 < number:
            _send_row(
                *(x_ptr, addresses_ptr, program, row + PROGRAMS, mine, before + index + 2, rank, size),
                *(RANKS, PROGRAMS, HEAD, BLOCK),
            )
        for peer in tl.static_range(RANKS):
            if peer != rank:
                sent = counts + (1 + peer) * PROGRAMS + program
                missing = before + index + 1 - tl.atomic_add(sent, 0, sem="acquire", scope="sys")
                while (missing > 0) & (left > 0):
                    missing = before + index + 1 - tl.atomic_add(sent, 0, sem="acquire", scope="sys")
                    left -= 1
                if missing > 0:
                    tl.store(host_ptr, peer + 1)
        x = tl.load(x_ptr + row.to(tl.int64) * size + column, mask=live, other=0.0)
        y = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            place = (parity + peer).to(tl.int64) * max_rows + row
            line = _rows_of(own, x_ptr, HEAD) + place * size + column
            # Written by another GPU: no cache of this multiprocessor is read.
            part = tl.load(line, mask=live & (peer != rank), other=0.0, cache_modifier=".cg")
            y += tl.where(peer == rank, x, part).to(tl.float32)
        line = row.to(tl.int64) * size + column
        residual = tl.load(residual_ptr + line, mask=live, other=0.0)
        total = (y.to(x.dtype).to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + line, total, mask=live)
        tl.store(out_ptr + line, normed_row(total, weight, size, eps, weight_ptr.dtype.element_ty), mask=live)
    tl.debug_barrier()  # all threads have read the counts before one of them sets them
    tl.store(counts + program, before + number)
    tl.store(states, call + 1)


def peer_rows_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: RowMemories
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual) for the sum y of x over the ranks; all [rows, size], contiguous."""
    rows, size = x.shape
    ranks = len(memory.addresses)
    programs = PROGRAMS_PER_PROCESSOR * multiprocessors(x.device)
    assert rows <= memory.max_rows, f"{rows} rows in a memory of {memory.max_rows}"
    assert (size, x.dtype) == (memory.size, memory.dtype), f"rows of {size} {x.dtype}"
    assert 4 * (2 + ranks) * programs <= HEAD_BYTES, f"the counts of {ranks} ranks do not fit"
    assert x.is_contiguous() and residual.is_contiguous(), "rows must be adjacent"  # noqa: PT018
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(size)
    _peer_rows_kernel[(programs,)](
        *(x, residual, weight, out, total, memory.addresses, memory.host),
        *(rows, size, memory.max_rows, eps, memory.rank, memory.polls),
        RANKS=ranks,
        PROGRAMS=programs,
        HEAD=HEAD_BYTES,
        BLOCK=block,
        num_warps=min(row_warps(block), 8),
        **chained(x.device),
    )
    return out, total
