"""Both ends of a decode step: reads its requests' rows of device state, and writes the step's results to them.

Each is a handful of integers per request, which torch would read in ten launches and write in six.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

BLOCK = 1024  # pages, or requests, per program


def step_rows_reference(
    rows: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gather the state of R requests for one new token each, which follows the tokens that have KV.

    Args:
        rows: [R] int64.
        last_token: [rows] int64.
        seq_len: [rows] int32, below W * page_size.
        rope_delta: [rows] int64, rotary position minus sequence index.
        pages: [rows, W] int32.

    Returns (token [R] int64, rotary position [R] int64, KV slot [R] int64, length including it [R] int32, page table
    [R, W] int32).
    """
    table, place = pages.index_select(0, rows), seq_len.index_select(0, rows).to(torch.int64)
    page = table.gather(1, (place // page_size)[:, None])[:, 0].to(torch.int64)
    return (
        last_token.index_select(0, rows),
        place + rope_delta.index_select(0, rows),
        page * page_size + place % page_size,
        (place + 1).to(torch.int32),
        table,
    )


@kernel_with_varying("width")
def _step_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R]
    last_ptr,  # [rows]
    len_ptr,  # [rows]
    delta_ptr,  # [rows]
    pages_ptr,  # [rows, width]
    token_ptr,  # [R]
    position_ptr,  # [R]
    slot_ptr,  # [R]
    out_len_ptr,  # [R]
    table_ptr,  # [R, width]
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + row * width + entry, mask=entry < width, other=0)
    tl.store(table_ptr + request * width + entry, page, mask=entry < width)
    if tl.program_id(1) == 0:
        place = tl.load(len_ptr + row).to(tl.int64)
        own = tl.load(pages_ptr + row * width + place // PAGE_SIZE).to(tl.int64)
        tl.store(token_ptr + request, tl.load(last_ptr + row))
        tl.store(position_ptr + request, place + tl.load(delta_ptr + row))
        tl.store(slot_ptr + request, own * PAGE_SIZE + place % PAGE_SIZE)
        tl.store(out_len_ptr + request, (place + 1).to(tl.int32))


def step_rows_triton(
    rows: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count, width = rows.shape[0], pages.shape[1]
    for column in (rows, last_token, seq_len, rope_delta, pages):
        assert column.is_contiguous(), "rows of state must be contiguous"
    token, position, slot, length, table = _outputs(rows, pages)
    if count:
        block = min(BLOCK, max(next_power_of_2(width), 16))
        _step_rows_kernel[(count, max(cdiv(width, block), 1))](
            rows,
            last_token,
            seq_len,
            rope_delta,
            pages,
            token,
            position,
            slot,
            length,
            table,
            width,
            PAGE_SIZE=page_size,
            BLOCK=block,
            num_warps=4,
            **chained(rows.device),
        )
    return token, position, slot, length, table


def _outputs(rows: Tensor, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    count = rows.shape[0]
    token, position, slot = (rows.new_empty(count) for _ in range(3))
    return token, position, slot, pages.new_empty(count), pages.new_empty((count, pages.shape[1]))


def _fake(
    rows: Tensor, last_token: Tensor, seq_len: Tensor, rope_delta: Tensor, pages: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(rows, pages)


step_rows = register_op("step_rows", step_rows_reference, mutates=(), fake=_fake, cuda=step_rows_triton)


def advance_rows_reference(
    rows: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, seq_len: Tensor
) -> None:
    """Write the drawn tokens [R] int64 and the lengths [R] int32 of a step to `rows` [R] int64 of device state.

    Row 0, which is padding, is not changed.
    """
    live = rows > 0
    last_token.index_copy_(0, rows, torch.where(live, tokens, last_token[0]))
    seq_len.index_copy_(0, rows, torch.where(live, lengths, seq_len[0]))


@kernel_with_varying("count", "token_stride")
def _advance_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,  # [R]
    tokens_ptr,  # [R]
    lengths_ptr,  # [R]
    last_ptr,  # [rows]
    len_ptr,  # [rows]
    count,
    row_stride,
    token_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = request < count
    row = tl.load(rows_ptr + request * row_stride, mask=live, other=0)
    live &= row > 0
    tl.store(last_ptr + row, tl.load(tokens_ptr + request * token_stride, mask=live, other=0), mask=live)
    tl.store(len_ptr + row, tl.load(lengths_ptr + request, mask=live, other=0), mask=live)


def advance_rows_triton(
    rows: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, seq_len: Tensor
) -> None:
    count = rows.shape[0]
    assert tokens.shape == lengths.shape == (count,), "a token and a length for each row"
    assert lengths.is_contiguous(), "lengths must be contiguous"
    assert last_token.is_contiguous(), "columns must be contiguous"
    assert seq_len.is_contiguous(), "columns must be contiguous"
    if count:
        block = min(BLOCK, next_power_of_2(count))
        _advance_rows_kernel[(cdiv(count, block),)](
            rows,
            tokens,
            lengths,
            last_token,
            seq_len,
            count,
            rows.stride(0),
            tokens.stride(0),
            BLOCK=block,
            num_warps=1,
            **chained(rows.device),
        )


def _nothing(rows: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, seq_len: Tensor) -> None:
    return None


advance_rows = register_op(
    "advance_rows",
    advance_rows_reference,
    mutates=("last_token", "seq_len"),
    fake=_nothing,
    cuda=advance_rows_triton,
)
