"""Stores one hidden state per request for the MTP module that reads it when its window opens.

It is the only writer of the per-request pool. It reads the rows of whatever computed them: the static buffer of a
replayed graph, or the output of an eager forward, with the matching lengths and starts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel, next_power_of_2, tl

MAX_BLOCK = 1024


def keep_hidden_reference(
    hidden: Tensor, rows: Tensor, pool: Tensor, step: int, lens: Tensor, starts: Tensor
) -> None:
    """Set pool[rows[b], step] = hidden[starts[b] + lens[b] - 1] for every request b that has rows.

    Args:
        hidden: [T, H] of one module, the rows of a request adjacent.
        rows: [B] int64, rows of the pool; distinct among requests that have rows.
        pool: [R, F, H] of the dtype of `hidden`, mutated.
        step: which of the F hidden states of a request is set.
        lens: [B] int64, number of valid rows of the request; 0 or less: its state is kept.
        starts: [B] int64, first row of a request.
    """
    if rows.shape[0] == 0:
        return
    newest = hidden.index_select(0, (starts + lens - 1).clamp(min=0))
    pool[rows, step] = torch.where((lens > 0)[:, None], newest, pool[rows, step])


@kernel
def _keep_hidden_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr,
    rows_ptr,
    pool_ptr,  # at `step`
    lens_ptr,
    starts_ptr,
    hidden_stride,
    pool_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program copies a part of one request's row."""
    request = tl.program_id(0)
    length = tl.load(lens_ptr + request)
    if length > 0:
        source = tl.load(starts_ptr + request) + length - 1
        row = tl.load(rows_ptr + request)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(hidden_ptr + source * hidden_stride + at, mask=at < SIZE)
        tl.store(pool_ptr + row * pool_stride + at, values, mask=at < SIZE)


def keep_hidden_triton(
    hidden: Tensor, rows: Tensor, pool: Tensor, step: int, lens: Tensor, starts: Tensor
) -> None:
    batch, (_, front, size) = rows.shape[0], pool.shape
    assert 0 <= step < front, f"step {step} of {front}"
    assert hidden.shape[1] == size, f"hidden states of {hidden.shape[1]} values, the pool has {size}"
    assert hidden.dtype == pool.dtype, f"{hidden.dtype} into a pool of {pool.dtype}"
    assert hidden.stride(1) == 1, "values of a row must be adjacent"
    assert pool.is_contiguous(), "the pool must be contiguous"
    assert rows.is_contiguous(), "pool rows must be contiguous"
    assert lens.shape == starts.shape == rows.shape, "a length and a start per request"
    assert lens.is_contiguous() and starts.is_contiguous(), "lengths and starts must be contiguous"  # noqa: PT018
    assert lens.dtype == starts.dtype == rows.dtype == torch.int64, "indices are int64"
    if batch == 0:
        return
    block = min(next_power_of_2(size), MAX_BLOCK)
    _keep_hidden_kernel[(batch, cdiv(size, block))](
        hidden,
        rows,
        pool[:, step],
        lens,
        starts,
        hidden.stride(0),
        front * size,
        SIZE=size,
        BLOCK=block,
        num_warps=4,
    )


def _fake(hidden: Tensor, rows: Tensor, pool: Tensor, step: int, lens: Tensor, starts: Tensor) -> None:
    return None


keep_hidden = register_op(
    "keep_hidden", keep_hidden_reference, mutates=("pool",), fake=_fake, cuda=keep_hidden_triton
)
