"""Rows that the ranks of a node exchange through memory that all of their GPUs map: sums, norms of them, and copies.

One kernel does all of it for few rows (one-shot all-reduce): the program of a row writes it into the memory of every
other rank, waits until the rows of the others are in its own memory, and adds all up in the order of the ranks, or
copies them. No other program takes part, so a row never waits for another row. More rows are summed by `peer_rows.py`.

How rows travel: `peer_words.py`. The turns of rows lie in the memory, so that a graph may be replayed, as long as all
ranks launch the same kernels in the same order.

A program gives up waiting after a number of polls, and soon after the host has stored the number of a lost rank in
`RankMemories.host`. All results are undefined from then on, and later programs do not wait at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_codes import GROUP, empty_codes, empty_scales, has_fp8, store_codes
from common.engine.ops.peer_memories import (
    DATA_BYTES,
    DATA_OFFSET,
    MAX_RANKS,
    MAX_ROWS,
    PLACE_BYTES,
    ROW_BYTES,
    SENDER_BYTES,
    RankMemories,
)
from common.engine.ops.peer_norm import SumNorm
from common.engine.ops.peer_rows import stream_sum
from common.engine.ops.peer_words import (
    first_half,
    joined_halves,
    look_at_row,
    polls_left,
    report_missing,
    second_half,
    send_row,
)
from common.engine.ops.rms_norm import add_rms_norm_reference
from common.engine.ops.row_norm import row_warps
from common.engine.ops.triton_kernel import (
    await_previous,
    await_results,
    chained,
    kernel_with_varying,
    launch_next,
    next_power_of_2,
    tl,
)

GATHERED = torch.int32  # what rows are copied as
MIN_WORDS = 128  # of a copied row; more rows than are needed only add programs


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


@kernel_with_varying("rank", "polls", "scale_stride", "group_stride")
def _peer_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size] of this rank
    residual_ptr,  # [rows, size]; read if NORM
    weight_ptr,  # [size]; read if NORM
    out_ptr,  # [rows, size]: the sum, or if NORM the normed rows, or if QUANTISED their codes
    scales_ptr,  # of the codes; written if QUANTISED
    total_ptr,  # [rows, size]; written if NORM
    addresses_ptr,  # [RANKS] int64
    host_ptr,  # [2] int32
    x_stride,  # in units of 4 bytes, as `words`
    residual_stride,
    scale_stride,
    group_stride,
    words,  # of a row
    eps,
    rank,
    polls,
    RANKS: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISED: tl.constexpr,  # as FP8 codes, which takes NORM
    BLOCKS: tl.constexpr,  # a scale per 128 values, else one per row
    HARDWARE: tl.constexpr,
    PAIRS: tl.constexpr,  # numbers have 16 bits
    ROWS: tl.constexpr,  # MAX_ROWS
    PLACE: tl.constexpr,  # bytes of a row's words
    DATA: tl.constexpr,  # DATA_OFFSET
    SENDER: tl.constexpr,  # SENDER_BYTES
    LOOK: tl.constexpr,  # polls_per_look
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, which is kept in registers as a whole."""
    launch_next(CHAINED)
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    live = word < words
    each: tl.constexpr = 2 if PAIRS else 1  # numbers of a word
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    ROUNDED: tl.constexpr = weight_ptr.dtype.element_ty
    own = tl.load(addresses_ptr + rank)  # which also brings the other addresses closer
    if NORM:  # no kernel of a step writes the weight
        first_weight = tl.load(weight_ptr + each * word, mask=live, other=0.0).to(tl.float32)
        second_weight = tl.load(weight_ptr + each * word + each - 1, mask=live, other=0.0).to(tl.float32)
    await_results(CHAINED)
    turns = own.to(tl.pointer_type(tl.int32))
    turn = tl.load(turns + row) + 1
    left = tl.where(tl.load(turns + ROWS) == 0, polls, 0)
    data = tl.load(
        x_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * x_stride + word, mask=live, other=0
    )
    send_row(addresses_ptr, row, turn, rank, data, word, live, RANKS, ROWS, PLACE, DATA, SENDER)
    if NORM:
        residual = residual_ptr.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * residual_stride + word
        residual = tl.load(residual, mask=live, other=0)
    missing = 1
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    while (missing > 0) & (left > 0):
        first = tl.zeros((BLOCK,), tl.float32)
        second = tl.zeros((BLOCK,), tl.float32)
        absent = tl.zeros((BLOCK,), tl.int32)
        for peer in tl.static_range(RANKS):
            part, late = look_at_row(own, row, peer, turn, rank, data, word, live, ROWS, PLACE, DATA, SENDER)
            absent |= late
            first += first_half(part, PAIRS, TYPE)
            if PAIRS:
                second += second_half(part, TYPE)
        missing = tl.max(absent, axis=0)
        left = polls_left(host_ptr, left, LOOK)
    if missing > 0:
        report_missing(host_ptr, own, row, turn, rank, data, word, live, RANKS, ROWS, PLACE, DATA, SENDER)
    tl.debug_barrier()  # all threads have read the turn before one of them sets it
    tl.store(turns + row, turn)
    found = joined_halves(first, second, PAIRS, TYPE)
    if NORM:
        first = first_half(found, PAIRS, TYPE) + first_half(residual, PAIRS, TYPE)
        if PAIRS:
            second = second_half(found, TYPE) + second_half(residual, TYPE)
        found = joined_halves(first, second, PAIRS, TYPE)
        tl.store(total_ptr.to(tl.pointer_type(tl.int32)) + row * words + word, found, mask=live)
        first = first_half(found, PAIRS, TYPE)
        squares = first * first
        if PAIRS:
            second = second_half(found, TYPE)
            squares += second * second
        scale = tl.rsqrt(tl.sum(squares, axis=0) / (each * words) + eps)
        first = (first * scale).to(ROUNDED).to(tl.float32) * first_weight
        second = (second * scale).to(ROUNDED).to(tl.float32) * second_weight
        found = joined_halves(first, second, PAIRS, TYPE)
    if QUANTISED:
        wide = first_half(found, PAIRS, TYPE)
        if PAIRS:
            wide = tl.interleave(wide, second_half(found, TYPE))
        size = each * words
        codes, line = out_ptr + row.to(tl.int64) * size, scales_ptr + row.to(tl.int64) * scale_stride
        store_codes(wide, codes, line, group_stride, 0, size, BLOCKS, HARDWARE, each * BLOCK)
    else:
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + row * words + word, found, mask=live)


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
    PLACE: tl.constexpr,  # bytes of a row's words
    DATA: tl.constexpr,  # DATA_OFFSET
    SENDER: tl.constexpr,  # SENDER_BYTES
    LOOK: tl.constexpr,  # polls_per_look
    BLOCK: tl.constexpr,  # words of a row
    CHAINED: tl.constexpr,
):
    """One program per row of BLOCK words, of which the last one may have fewer."""
    await_previous(CHAINED)
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    source = row * BLOCK + word
    live = source < words
    own = tl.load(addresses_ptr + rank)
    turns = own.to(tl.pointer_type(tl.int32))
    turn = tl.load(turns + row) + 1
    left = tl.where(tl.load(turns + ROWS) == 0, polls, 0)
    data = tl.load(x_ptr + source, mask=live, other=0)
    send_row(addresses_ptr, row, turn, rank, data, word, live, RANKS, ROWS, PLACE, DATA, SENDER)
    missing = 1
    while (missing > 0) & (left > 0):
        absent = tl.zeros((BLOCK,), tl.int32)
        for peer in tl.static_range(RANKS):
            _, late = look_at_row(own, row, peer, turn, rank, data, word, live, ROWS, PLACE, DATA, SENDER)
            absent |= late
        missing = tl.max(absent, axis=0)
        left = polls_left(host_ptr, left, LOOK)
    if missing > 0:
        report_missing(host_ptr, own, row, turn, rank, data, word, live, RANKS, ROWS, PLACE, DATA, SENDER)
    tl.debug_barrier()  # all threads have read the turn before one of them sets it
    tl.store(turns + row, turn)
    for peer in tl.static_range(RANKS):
        part, _ = look_at_row(own, row, peer, turn, rank, data, word, live, ROWS, PLACE, DATA, SENDER)
        tl.store(out_ptr + peer * words + source, part, mask=live)


def peer_sum_triton(x: Tensor, memory: RankMemories) -> Tensor:
    """Return the sum of x [..., H] over the ranks; of rows over ROW_BYTES, piece by piece."""
    if memory.fits(x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _sum(x.flatten(0, -2), out, memory)
        return out
    size, count = ROW_BYTES // x.itemsize, x.numel()
    given = F.pad(x.reshape(-1), (0, count * x.itemsize % DATA_BYTES // x.itemsize))
    sums = torch.empty_like(given)
    for start, stop in _pieces(len(given), MAX_ROWS * size):
        # Rows of full size, and what is left as a row of its own.
        middle = start + (stop - start) // size * size
        for begin, end, width in ((start, middle, size), (middle, stop, stop - middle)):
            if end > begin:
                part = given[begin:end].view(-1, width)
                # One kernel for all widths: that of what is left depends on the number of rows.
                _launch(part, sums[begin:end], memory, widest=size)
    return sums[:count].view(x.shape)


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


def _whole_words(rows: Tensor) -> Tensor:
    """Return rows [n, H] that begin at whole words; H may be such that they end within one."""
    at_words = not (rows.stride(0) * rows.itemsize % DATA_BYTES or rows.data_ptr() % DATA_BYTES)
    return rows if at_words and rows.stride(1) == 1 else rows.clone(memory_format=torch.contiguous_format)


def _pieces(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the (start, stop) of at most `most` of `total` elements each."""
    for start in range(0, total, most):
        yield start, min(start + most, total)


def peer_sum_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: RankMemories
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual) for the sum y of x over the ranks; all [..., H]."""
    out, norm = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        SumNorm.of(x, residual, weight, eps),
    )
    _sum(x.flatten(0, -2), out, memory, norm)
    return out, norm.total


def peer_sum_fp8_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool, memory: RankMemories
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `fp8_add_rms_norm` of the sum of x [..., H] over the ranks: (codes, scales, total)."""
    codes = empty_codes(x, x.shape[-1])
    scales, norm = empty_scales(x, x.shape[-1], blocks), SumNorm.of(x, residual, weight, eps)
    _sum(x.flatten(0, -2), codes, memory, norm._replace(scales=scales, blocks=blocks))
    return codes, scales, norm.total


def _sum(rows: Tensor, out: Tensor, memory: RankMemories, norm: SumNorm | None = None) -> None:
    """Sum rows [count, size], each of up to ROW_BYTES, into `out`: few rows at once, many one after another."""
    if memory.holds(rows):
        _launch(_whole_words(rows), out, memory, norm)
    else:
        stream_sum(rows, out, memory, norm)


def _launch(
    rows: Tensor, out: Tensor, memory: RankMemories, norm: SumNorm | None = None, widest: int = 0
) -> None:
    """Sum rows [count, size] by a kernel for rows of up to `widest` values; 0: for rows of this size."""
    count, size = rows.shape
    ranks = len(memory.addresses)
    assert memory.holds(rows), f"{count} rows of {size} do not fit into the ranks' memory"
    assert 0 <= memory.rank < ranks <= MAX_RANKS, f"rank {memory.rank} of {ranks}"
    given = norm or SumNorm(rows, rows, out, 0.0)
    residual = _whole_words(given.residual)
    assert rows.stride(1) == residual.stride(1) == 1, "the elements of a row must be adjacent"
    if count == 0:
        return
    per_word = DATA_BYTES // rows.itemsize
    words, block = size // per_word, next_power_of_2((widest or size) // per_word)
    lines = None if given.scales is None else given.scales.flatten(0, -2)
    _peer_sum_kernel[(count,)](
        rows,
        residual,
        given.gain,
        out if lines is None else out.view(torch.uint8),
        out if lines is None else lines,
        given.total,
        memory.addresses,
        memory.host,
        rows.stride(0) // per_word,
        residual.stride(0) // per_word,
        0 if lines is None else lines.stride(0),
        0 if lines is None else lines.stride(1),
        words,
        given.eps,
        memory.rank,
        memory.polls,
        RANKS=ranks,
        NORM=norm is not None,
        QUANTISED=lines is not None,
        BLOCKS=given.blocks,
        HARDWARE=has_fp8(rows.device),
        PAIRS=per_word == 2,
        ROWS=MAX_ROWS,
        PLACE=PLACE_BYTES,
        DATA=DATA_OFFSET,
        SENDER=SENDER_BYTES,
        LOOK=memory.polls_per_look,
        BLOCK=block if lines is None else max(block, GROUP // per_word),
        num_warps=row_warps(per_word * block),
        **chained(rows.device),
    )


def _gather(words: Tensor, memory: RankMemories) -> Tensor:
    """Return [ranks, n] of the words [n] of all ranks, which `memory` holds."""
    count, ranks = len(words), len(memory.addresses)
    out = words.new_empty(ranks, count)
    block = max(next_power_of_2(-(-count // MAX_ROWS)), MIN_WORDS)
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
        PLACE=PLACE_BYTES,
        DATA=DATA_OFFSET,
        SENDER=SENDER_BYTES,
        LOOK=memory.polls_per_look,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(words.device),
    )
    return out
