"""The norm that follows a sum over ranks, as the kernels of sums take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SumNorm(NamedTuple):
    """The residual addition and RMSNorm of sums [..., size], and where a kernel writes what it computes."""

    residual: Tensor  # [..., size]
    gain: Tensor  # [size], by which normed values are multiplied
    total: Tensor  # [..., size], to be written
    eps: float
    scales: Tensor | None = None  # to be written; None: the normed rows are not quantised
    blocks: bool = False

    @classmethod
    def of(cls, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> SumNorm:
        """Return the norm of the sum of x [..., size] over the ranks, with a new `total`."""
        assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
        assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
        assert weight.shape == (x.shape[-1],), f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}"
        assert weight.is_contiguous(), "the weight must be contiguous"
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        return cls(residual.flatten(0, -2), weight, total, eps)
