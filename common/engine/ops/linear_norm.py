"""A product, what it is added to, and the norm behind the sum: the end of attention and of the feed-forward block.

For few rows the depth of the product is divided among programs, since such a matrix has too few columns to keep the
memory busy, and the norm adds the parts up: a library's sum of them is a launch of its own, twice in every layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.linear import FEW, Tiles, halves, linear, linear_parts, rows_of
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import (
    add_parts_rms_norm_triton,
    add_rms_norm_reference,
    add_rms_norm_triton,
)
from common.engine.ops.triton_kernel import cdiv, multiprocessors

STEP = 256  # of the depth


def linear_add_rms_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual), y = x W^T + b; x [..., in], weight [H, in], residual [..., H].

    y is rounded to the dtype of x before it is added.
    """
    return add_rms_norm_reference(F.linear(x, weight, bias), residual, norm_weight, eps)


def divide_depth(rows: int, size: int, depth: int, processors: int) -> Tiles | None:
    """For x of so many rows and a weight [size, depth]; None where cuBLAS is faster.

    Two programs for each multiprocessor, or one of four times the rows. Measured with the 8B shape on an H200
    (tests/bench/NOTES.md); other shapes follow from its two.
    """
    deep = depth >= 8192
    if depth < 2048 or (rows > FEW and not (deep and 2 * FEW < rows <= 4 * FEW)):
        return None
    columns, each, tile = (64 if deep else 32), *((2, FEW) if rows <= FEW else (1, 4 * FEW))
    wanted, steps = each * processors // cdiv(size, columns), cdiv(depth, STEP)
    if wanted < 2:
        return None
    of_each = cdiv(steps, min(1 << (wanted.bit_length() - 1), 8))
    return Tiles(columns, STEP, 4, 3, parts=cdiv(steps, of_each), rows=tile)  # none without a step


def _cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    size, depth = weight.shape
    division = divide_depth(rows_of(x), size, depth, multiprocessors(x.device))
    if division is None or bias is not None or not halves(x, weight):
        return add_rms_norm_triton(linear(x, weight, bias), residual, norm_weight, eps)
    return add_parts_rms_norm_triton(linear_parts(x, weight, division), residual, norm_weight, eps)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


linear_add_rms_norm = register_op(
    "linear_add_rms_norm", linear_add_rms_norm_reference, mutates=(), fake=_fake, cuda=_cuda
)
