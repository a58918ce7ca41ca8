"""Keys and values in eight bits (e4m3): the rounding that all writers of pages share, and what readers see.

Scales are powers of two, so a stored value times its scale is exact in every dtype that models compute in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import kernel, tl

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3; larger values are stored as this


def as_stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `values` as a plane of `dtype` stores them: divided by `scale` if these are eight bits."""
    if dtype is not FP8:
        return values.to(dtype)
    return (values.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8)


def as_read(stored: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return values of a plane as attention reads them: of eight bits in `dtype`, others as they are."""
    return stored.to(dtype) * scale if stored.dtype is FP8 else stored


def in_halves(query: Tensor, plane: Tensor) -> bool:
    """Return whether kernels multiply in float16: e4m3 becomes bfloat16 in three instructions, float16 in one.

    A float16 has all bits of a bfloat16 but range, which queries do not use.
    """
    return plane.dtype is FP8 and query.dtype is torch.bfloat16


def selected(plane: Tensor, index: Tensor) -> Tensor:
    """Return plane[index] along the first axis, also where torch cannot select eight-bit floats."""
    if plane.dtype is not FP8:
        return plane.index_select(0, index)
    return plane.view(torch.uint8).index_select(0, index).view(FP8)


@kernel
def halves(query):  # type: ignore[no-untyped-def]
    """Return a bfloat16 `query` in float16; larger values become the largest."""
    return tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@kernel
def rounded_to_fp8(values, scale):  # type: ignore[no-untyped-def]
    """Return `values` divided by `scale` (a number, or one that broadcasts) in e4m3."""
    # A power of two: dividing is exact.
    divided = values.to(tl.float32) / scale
    return tl.minimum(tl.maximum(divided, -448.0), 448.0).to(tl.float8e4nv)
