"""FP8 products with what follows them: the activation of a gated block, or the residual addition and the norm.

For few rows the activation is part of the product, and the depth of a product with too few columns is divided among
programs whose results the norm adds up, as in `linear` and `linear_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.fp8_fused import (
    fp8_add_parts_rms_norm_triton,
    fp8_add_rms_norm_reference,
    fp8_add_rms_norm_triton,
    fp8_gate_reference,
    fp8_gate_triton,
)
from common.engine.ops.fp8_gated import fp8_gated_triton
from common.engine.ops.fp8_linear import fp8_product_cuda, fp8_product_reference
from common.engine.ops.fp8_product import fp8_product_parts
from common.engine.ops.fp8_rows import quantize_rows_triton
from common.engine.ops.fp8_tiles import Fp8Tiles, choose_fp8_gated_tiles, divide_fp8_depth
from common.engine.ops.fp8_vectors import choose_fp8_vectors, fp8_vector_triton
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import (
    add_parts_rms_norm_triton,
    add_rms_norm_reference,
    add_rms_norm_triton,
)
from common.engine.ops.shared_memory import room_of
from common.engine.ops.triton_kernel import multiprocessors


def fp8_gated_reference(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return activation(gate) * up [..., I], quantised, for quantised x [..., in] and weight [2 * I, in], gates first.

    Args:
        activation: of the gates, see `gated_linear`.
        dtype: that of activations, to which gate, up and the result are rounded.
    """
    gate_up = fp8_product_reference(codes, row_scales, weight, scales, bias, dtype)
    return fp8_gate_reference(gate_up, activation, scales.ndim == 2)


def fp8_gated_cuda(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows, blocks = codes.shape[:-1].numel(), scales.ndim == 2
    given = codes, row_scales, weight, scales, bias
    size, depth = weight.shape
    vectors = choose_fp8_vectors(rows, size, depth, gated=True)
    gpu = multiprocessors(codes.device), room_of(codes.device).shared_bytes
    tiles = choose_fp8_gated_tiles(rows, size, depth, blocks, *gpu)
    if bias is None and vectors is not None:
        inner = fp8_vector_triton(*given, vectors, dtype, activation)
    elif bias is None and tiles is not None:
        inner = fp8_gated_triton(codes, row_scales, weight, scales, tiles, dtype, activation)
    else:
        return fp8_gate_triton(fp8_product_cuda(*given, dtype), activation, blocks)
    return quantize_rows_triton(inner, blocks)


def _gated_fake(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    size = weight.shape[0] // 2
    return codes.new_empty((*codes.shape[:-1], size), dtype=FP8), empty_scales(codes, size, scales.ndim == 2)


fp8_gated = register_op("fp8_gated", fp8_gated_reference, mutates=(), fake=_gated_fake, cuda=fp8_gated_cuda)


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
