"""Keys and values in eight bits (e4m3): the rounding that all writers of pages share, and how readers take them.

Scales are powers of two, so a stored value times its scale is exact in every dtype that models compute in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, HIGHEST
from common.engine.ops.triton_kernel import kernel, tl


def as_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `values` as a plane of `dtype` stores them: if in eight bits, divided by `scale` and at most HIGHEST."""
    if dtype is not FP8:
        return values.to(dtype)
    return (values.float() / scale).clamp_(-HIGHEST, HIGHEST).to(FP8)


def as_read(stored: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return values of a plane as attention reads them: of eight bits in `dtype`, others as they are."""
    return stored.to(dtype) * scale if stored.dtype is FP8 else stored


def selected(plane: Tensor, index: Tensor) -> Tensor:
    """Return plane[index] along the first axis, also where torch cannot select eight-bit floats."""
    if plane.dtype is not FP8:
        return plane.index_select(0, index)
    return plane.view(torch.uint8).index_select(0, index).view(FP8)


@kernel
def rounded_to_fp8(values, scale):  # type: ignore[no-untyped-def]
    """Return `values` divided by `scale` (a number, or one that broadcasts) in e4m3."""
    # A power of two: dividing is exact.
    divided = values.to(tl.float32) / scale
    return tl.minimum(tl.maximum(divided, -448.0), 448.0).to(tl.float8e4nv)


@kernel
def for_fp8_keys(query):  # type: ignore[no-untyped-def]
    """Return a tile of queries in the dtype of products with e4m3 keys and values.

    For bfloat16 queries this is float16, which e4m3 becomes in one instruction instead of three. It has all bits of a
    bfloat16, but not its range: larger queries become the largest.
    """
    if query.dtype == tl.bfloat16:
        query = tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return query


@kernel
def spread_columns(values, KEYS: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile of e4m3 values whose column c is column `spread(c)` of `values`.

    Products of few rows read values across keys. In this order a thread needs four adjacent bytes of a key, which it
    loads from shared memory at once; in the original order it would load each byte by itself.
    """
    grouped = tl.reshape(values, (KEYS, BLOCK_D // 4, 4))
    return tl.reshape(tl.permute(grouped, (0, 2, 1)), (KEYS, BLOCK_D))


@kernel
def spread(column, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the original columns of columns that `spread_columns` moved."""
    return column % (BLOCK_D // 4) * 4 + column // (BLOCK_D // 4)
