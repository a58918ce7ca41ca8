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


@kernel
def rounded_to_fp8(values, scale):  # type: ignore[no-untyped-def]
    """Return `values` divided by `scale` (a number, or one that broadcasts) in e4m3."""
    # A power of two: dividing is exact.
    divided = values.to(tl.float32) / scale
    return tl.minimum(tl.maximum(divided, -448.0), 448.0).to(tl.float8e4nv)
