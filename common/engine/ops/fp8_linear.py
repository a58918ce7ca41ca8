"""Products with weights in FP8 (e4m3), whose inputs are quantised to FP8 while serving.

A stored value is a code times a scale. The shape of a weight's scales names the scheme:

- channels: one scale per row of the weight [N], and one per row of x [..., 1];
- blocks: one scale per 128 x 128 values of the weight [ceil(N / 128), ceil(K / 128)], and one per 128 values of a row
  of x [..., ceil(K / 128)].

The scales of x depend on its own row only, so a row's result does not depend on the batch. Products of codes are added
up in float32; the library's products with scales per channel add up with fewer bits (`fp8_library.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, GROUP, MAX_CODE
from common.engine.ops.fp8_library import library_product
from common.engine.ops.fp8_product import fp8_product_triton
from common.engine.ops.fp8_rows import quantize_rows, quantize_rows_reference, quantize_with
from common.engine.ops.fp8_tiles import choose_fp8_tiles, library_is_faster
from common.engine.ops.fp8_vectors import choose_fp8_vectors, fp8_vector_triton
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import room_of
from common.engine.ops.triton_kernel import multiprocessors

__all__ = [
    "FP8",
    "GROUP",
    "MAX_CODE",
    "fp8_linear",
    "fp8_linear_reference",
    "fp8_product",
    "fp8_product_cuda",
    "fp8_product_reference",
    "quantize_rows",
    "quantize_rows_reference",
    "quantize_with",
    "values_of",
]


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of a weight [N, K] with the scales of either scheme."""
    if scales.ndim == 1:
        return codes.float() * scales[:, None]
    rows, columns = codes.shape
    wide = scales.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    return codes.float() * wide


def fp8_product_reference(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return x W^T + b [..., N] for x that is quantised already; the sum is rounded to `dtype`.

    Args:
        codes: of x [..., K].
        row_scales: of x, float32, as `quantize_rows` returns them in the scheme of `scales`.
        weight: codes [N, K].
        scales: of the weight, float32 [N], or [ceil(N / 128), ceil(K / 128)].
        bias: [N].
    """
    if scales.ndim == 1:
        out = codes.float() @ weight.float().T * row_scales * scales
    else:
        wide = row_scales.repeat_interleave(GROUP, -1)[..., : codes.shape[-1]]
        out = (codes.float() * wide) @ values_of(weight, scales).T
    return (out if bias is None else out + bias).to(dtype)


def fp8_product_cuda(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    rows, blocks = codes.shape[:-1].numel(), scales.ndim == 2
    vectors = choose_fp8_vectors(rows, *weight.shape)
    if vectors is not None:
        return fp8_vector_triton(codes, row_scales, weight, scales, bias, vectors, dtype)
    if library_is_faster(rows, blocks):
        out = library_product(codes, row_scales, weight, scales, bias, dtype)
        if out is not None:
            return out
    gpu = multiprocessors(codes.device), room_of(codes.device).shared_bytes
    tiles = choose_fp8_tiles(rows, len(weight), blocks, *gpu)
    return fp8_product_triton(codes, row_scales, weight, scales, bias, tiles, dtype)


def _product_fake(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=dtype)


fp8_product = register_op(
    "fp8_product", fp8_product_reference, mutates=(), fake=_product_fake, cuda=fp8_product_cuda
)


def fp8_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [..., N] for dense x [..., K], which is quantised in the scheme of `scales` first."""
    codes, row_scales = quantize_rows_reference(x, scales.ndim == 2)
    return fp8_product_reference(codes, row_scales, weight, scales, bias, x.dtype)


def _linear_cuda(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    codes, row_scales = quantize_rows(x, scales.ndim == 2)
    return fp8_product_cuda(codes, row_scales, weight, scales, bias, x.dtype)


def _linear_fake(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


fp8_linear = register_op("fp8_linear", fp8_linear_reference, mutates=(), fake=_linear_fake, cuda=_linear_cuda)
