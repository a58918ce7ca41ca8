"""A product, the residual addition and the norm after it: the end of attention and of the feed-forward block.

For few rows the depth of the product is divided among programs, since such a matrix has too few columns to saturate
the memory, and the norm adds up the parts: a library would launch the sum separately, twice in every layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.linear import halves, linear, linear_parts, rows_of
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import (
    add_parts_rms_norm_triton,
    add_rms_norm_reference,
    add_rms_norm_triton,
)
from common.engine.ops.shared_memory import room_of
from common.engine.ops.tiles import divide_depth
from common.engine.ops.triton_kernel import multiprocessors
from common.engine.ops.vector_products import choose_vectors


def linear_add_rms_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual), y = x W^T + b; x [..., in], weight [H, in], residual [..., H].

    y is rounded to the dtype of x before it is added.
    """
    return add_rms_norm_reference(F.linear(x, weight, bias), residual, norm_weight, eps)


def linear_add_rms_norm_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    size, depth = weight.shape
    gpu = multiprocessors(x.device), room_of(x.device).shared_bytes
    division = divide_depth(rows_of(x), size, depth, *gpu)
    if division is None or choose_vectors(rows_of(x), size, depth) is not None or not halves(x, weight):
        return add_rms_norm_triton(linear(x, weight, bias), residual, norm_weight, eps)
    return add_parts_rms_norm_triton(linear_parts(x, weight, bias, division), residual, norm_weight, eps)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


linear_add_rms_norm = register_op(
    "linear_add_rms_norm",
    linear_add_rms_norm_reference,
    mutates=(),
    fake=_fake,
    cuda=linear_add_rms_norm_cuda,
)
