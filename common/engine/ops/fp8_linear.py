"""Products with weights in FP8 (e4m3), whose inputs are quantised to FP8 while serving.

A stored value is a code times a scale. The shape of a weight's scales names the scheme:

- channels: one scale per row of the weight [N], and one per row of x [..., 1];
- blocks: one scale per 128 x 128 values of the weight [ceil(N / 128), ceil(K / 128)], and one per 128 values of a row
  of x [..., ceil(K / 128)].

The scales of x depend on its own row only, so a row's result does not depend on the batch. Products of codes are added
up in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_library import library_product
from common.engine.ops.registration import register_op

FP8 = torch.float8_e4m3fn
HIGHEST = 448.0  # the largest code
SMALLEST = 1e-12  # a row's largest magnitude counts as at least this: a row of zeros has a scale, too
GROUP = 128  # values that share a scale of x, and rows and columns that share one of the weight


def quantize_rows_reference(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K] to (codes [..., K], float32 scales).

    A scale is the largest magnitude of its values divided by the largest code, and code = value / scale.

    Args:
        blocks: one scale per 128 values [..., ceil(K / 128)], else one per row [..., 1].
    """
    wide, size = x.float(), x.shape[-1]
    if not blocks:
        scales = _scales(wide)
        return _codes(wide, scales), scales
    groups = -(-size // GROUP)
    padded = F.pad(wide, (0, groups * GROUP - size)).view(*x.shape[:-1], groups, GROUP)
    scales = _scales(padded)
    return _codes(padded, scales).flatten(-2)[..., :size].contiguous(), scales.squeeze(-1)


def _scales(wide: Tensor) -> Tensor:
    return wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / HIGHEST


def _codes(wide: Tensor, scales: Tensor) -> Tensor:
    return (wide / scales).clamp(-HIGHEST, HIGHEST).to(FP8)


def _quantize_fake(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[-1] // GROUP) if blocks else 1
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


quantize_rows = register_op("quantize_rows", quantize_rows_reference, mutates=(), fake=_quantize_fake)


def quantize_with_reference(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K] with one given scale [] float32: (codes [..., K], the scale for each row [..., 1])."""
    return _codes(x.float(), scale), scale.expand(*x.shape[:-1], 1).contiguous()


def _with_fake(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _quantize_fake(x)


quantize_with = register_op("quantize_with", quantize_with_reference, mutates=(), fake=_with_fake)


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
    """Return x W^T + b [..., N] for x that is quantised already; the product is rounded to `dtype` before b is added.

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
    return out.to(dtype) if bias is None else out.to(dtype) + bias


def _product_cuda(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    out = library_product(codes, row_scales, weight, scales, bias, dtype)
    if out is not None:
        return out
    return fp8_product_reference(codes, row_scales, weight, scales, bias, dtype)


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
    "fp8_product", fp8_product_reference, mutates=(), fake=_product_fake, cuda=_product_cuda
)


def fp8_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b [..., N] for dense x [..., K], which is quantised in the scheme of `scales` first."""
    codes, row_scales = quantize_rows_reference(x, scales.ndim == 2)
    return fp8_product_reference(codes, row_scales, weight, scales, bias, x.dtype)


def _linear_cuda(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    codes, row_scales = quantize_rows(x, scales.ndim == 2)
    return _product_cuda(codes, row_scales, weight, scales, bias, x.dtype)


def _linear_fake(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


fp8_linear = register_op("fp8_linear", fp8_linear_reference, mutates=(), fake=_linear_fake, cuda=_linear_cuda)
