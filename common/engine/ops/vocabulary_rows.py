"""The rows of an embedding of which a rank holds a part of the vocabulary; zeros for the tokens of other ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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

MAX_BLOCK = 1024


def vocabulary_rows_reference(ids: Tensor, weight: Tensor, begin: int) -> Tensor:
    """Return [T, H]: weight[id - begin], or zeros where that row does not exist.

    Args:
        ids: [T] int64.
        weight: [tokens, H], of the tokens `begin` and following.
    """
    foreign = (ids < begin) | (ids >= begin + weight.shape[0])
    rows = F.embedding((ids - begin).masked_fill(foreign, 0), weight)
    return rows.masked_fill(foreign.unsqueeze(-1), 0.0)


@kernel_with_varying("begin", "tokens", "ids_stride")
def _vocabulary_rows_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [rows] int64
    weight_ptr,  # [tokens, size]
    out_ptr,  # [rows, size]
    ids_stride,
    begin,
    tokens,
    size,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program copies a part of one row."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row * ids_stride) - begin
    own = (token >= 0) & (token < tokens)
    values = tl.load(weight_ptr + token * size + column, mask=(column < size) & own, other=0.0)
    tl.store(out_ptr + row * size + column, values, mask=column < size)


def vocabulary_rows_triton(ids: Tensor, weight: Tensor, begin: int) -> Tensor:
    (count,), (tokens, size) = ids.shape, weight.shape
    assert ids.dtype == torch.int64, f"ids of {ids.dtype}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    out = weight.new_empty((count, size))
    if count:
        block = min(next_power_of_2(size), MAX_BLOCK)
        _vocabulary_rows_kernel[(count, cdiv(size, block))](
            ids,
            weight,
            out,
            ids.stride(0),
            begin,
            tokens,
            size,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **chained(ids.device),
        )
    return out


def _fake(ids: Tensor, weight: Tensor, begin: int) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


vocabulary_rows = register_op(
    "vocabulary_rows", vocabulary_rows_reference, mutates=(), fake=_fake, cuda=vocabulary_rows_triton
)
