"""FP8 products whose outputs are added to the residual stream, and the norm of the sum: `linear_norm` for FP8 weights.

For few rows, the depth of a product with too few columns is divided among programs whose results the norm adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.fp8_linear import fp8_product_cuda, fp8_product_reference
from common.engine.ops.fp8_product import fp8_product_parts
from common.engine.ops.fp8_rms_norm import (
    fp8_add_parts_rms_norm_triton,
    fp8_add_rms_norm_reference,
    fp8_add_rms_norm_triton,
)
from common.engine.ops.fp8_tiles import Fp8Tiles, divide_fp8_depth
from common.engine.ops.fp8_vectors import choose_fp8_vectors
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import (
    add_parts_rms_norm_triton,
    add_rms_norm_reference,
    add_rms_norm_triton,
)
from common.engine.ops.shared_memory import room_of
from common.engine.ops.triton_kernel import multiprocessors


def fp8_product_norm_reference(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual), y = x W^T + b for quantised x [..., in] and residual [..., H].

    y is rounded to the dtype of the residual before it is added.
    """
    y = fp8_product_reference(codes, row_scales, weight, scales, bias, residual.dtype)
    return add_rms_norm_reference(y, residual, norm_weight, eps)


def fp8_product_norm_cuda(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tiles = _division(codes, weight, scales)
    if tiles is None:
        y = fp8_product_cuda(codes, row_scales, weight, scales, bias, residual.dtype)
        return add_rms_norm_triton(y, residual, norm_weight, eps)
    parts = fp8_product_parts(codes, row_scales, weight, scales, bias, tiles)
    return add_parts_rms_norm_triton(parts, residual, norm_weight, eps)


def _norm_fake(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


fp8_product_norm = register_op(
    "fp8_product_norm", fp8_product_norm_reference, mutates=(), fake=_norm_fake, cuda=fp8_product_norm_cuda
)


def fp8_product_norm_quantized_reference(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    blocks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, total) of `fp8_product_norm`, with the norm quantised as by `quantize_rows`."""
    y = fp8_product_reference(codes, row_scales, weight, scales, bias, residual.dtype)
    return fp8_add_rms_norm_reference(y, residual, norm_weight, eps, blocks)


def fp8_product_norm_quantized_cuda(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    blocks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tiles = _division(codes, weight, scales)
    if tiles is None:
        y = fp8_product_cuda(codes, row_scales, weight, scales, bias, residual.dtype)
        return fp8_add_rms_norm_triton(y, residual, norm_weight, eps, blocks)
    parts = fp8_product_parts(codes, row_scales, weight, scales, bias, tiles)
    return fp8_add_parts_rms_norm_triton(parts, residual, norm_weight, eps, blocks)


def _quantized_fake(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    blocks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    return torch.empty_like(total, dtype=FP8), empty_scales(total, total.shape[-1], blocks), total


fp8_product_norm_quantized = register_op(
    "fp8_product_norm_quantized",
    fp8_product_norm_quantized_reference,
    mutates=(),
    fake=_quantized_fake,
    cuda=fp8_product_norm_quantized_cuda,
)


def _division(codes: Tensor, weight: Tensor, scales: Tensor) -> Fp8Tiles | None:
    size, depth = weight.shape
    if choose_fp8_vectors(codes.shape[:-1].numel(), size, depth) is not None:
        return None
    gpu = multiprocessors(codes.device), room_of(codes.device).shared_bytes
    return divide_fp8_depth(codes.shape[:-1].numel(), size, depth, scales.ndim == 2, *gpu)
