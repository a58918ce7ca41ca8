"""Keys and values in eight bits (e4m3): the rounding that all writers of pages share, and how readers take them.

Scales are powers of two, so a stored value times its scale is exact in every dtype that models compute in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, MAX_CODE
from common.engine.ops.triton_kernel import kernel, tl


def as_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `values` as a plane of `dtype` stores them: if in eight bits, divided by `scale` and at most MAX_CODE."""
    if dtype is not FP8:
        return values.to(dtype)
    return (values.float() / scale).clamp_(-MAX_CODE, MAX_CODE).to(FP8)


def as_read(stored: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return values of a plane as attention reads them: of eight bits in `dtype`, others as they are."""
    return stored.to(dtype) * scale if stored.dtype is FP8 else stored


def selected(plane: Tensor, index: Tensor) -> Tensor:
    """Return plane[index] along the first axis, even where torch cannot select eight-bit floats."""
    if plane.dtype is not FP8:
        return plane.index_select(0, index)
    return plane.view(torch.uint8).index_select(0, index).view(FP8)


@kernel
def rounded_to_fp8(values, scale):  # type: ignore[no-untyped-def]
    """Return `values` divided by `scale` (a number, or one that broadcasts), rounded to e4m3 but in float32.

    It rounds with integers and never converts back from e4m3: on an H200 (torch 2.11, Triton 3.6), constants came back
    instead of some values that the same kernel had just converted to e4m3, although the PTX was right.
    """
    # A power of two: dividing is exact.
    divided = tl.minimum(tl.maximum(values.to(tl.float32) / scale, -448.0), 448.0)
    size = tl.abs(divided)
    bits = size.to(tl.int32, bitcast=True)
    # To nearest even, with three bits of the mantissa.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Numbers around 2^14 have the spacing of e4m3's subnormal numbers, 2^-9.
    small = ((size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000).to(tl.float32) * 0.001953125
    rounded = tl.where(size < 0.015625, small, normal)
    # Zeros have a sign, too.
    sign = divided.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


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
