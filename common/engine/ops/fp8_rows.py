"""Quantises rows to FP8 with dynamic scales, after an activation if wanted."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_codes import (
    FP8,
    GROUP,
    MAX_CODE,
    MIN_MAGNITUDE,
    STEP,
    empty_codes,
    empty_scales,
    encode,
    has_fp8,
    store_codes,
)
from common.engine.ops.registration import register_op
from common.engine.ops.silu_mul import activate
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)

SPAN = 2048  # values per program, if a row has several scales


def quantize_rows_reference(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K] to (codes [..., K], float32 scales).

    A scale is the largest magnitude of its values divided by the largest code, and code = value / scale. Both are
    computed by multiplications, which every device rounds alike.

    Args:
        blocks: one scale per 128 values [..., ceil(K / 128)], else one per row [..., 1]. They have the strides of a
            tensor [groups, rows].
    """
    size = x.shape[-1]
    group = GROUP if blocks else max(size, 1)
    groups = cdiv(size, group)
    padded = F.pad(x.float(), (0, groups * group - size)).view(*x.shape[:-1], groups, group)
    largest = padded.abs().amax(-1).clamp(min=MIN_MAGNITUDE)
    codes = (padded * (largest.reciprocal() * MAX_CODE).unsqueeze(-1)).clamp(-MAX_CODE, MAX_CODE).to(FP8)
    scales = empty_scales(x, size, blocks).copy_(largest * STEP)
    return codes.flatten(-2)[..., :size].clone(memory_format=torch.contiguous_format), scales


@kernel_with_varying("scale_stride", "group_stride")
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size], or if GATED [rows, 2 * size]
    codes_ptr,  # [rows, size] bytes
    scales_ptr,
    x_stride,
    scale_stride,
    group_stride,
    size,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCKS: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, or if BLOCKS per BLOCK values of a row."""
    await_previous(CHAINED)
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = begin + tl.arange(0, BLOCK)
    live = column < size
    line = x_ptr + row * x_stride + column
    x = tl.load(line, mask=live, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(line + size, mask=live, other=0.0).to(tl.float32)
        x = (activate(x, GELU) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    line = scales_ptr + row * scale_stride
    store_codes(x, codes_ptr + row * size, line, group_stride, begin, size, BLOCKS, HARDWARE, BLOCK)


def quantize_rows_triton(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    return launch_quantizer(x, blocks, activation=None)


def launch_quantizer(x: Tensor, blocks: bool, activation: str | None) -> tuple[Tensor, Tensor]:
    """Quantise the rows of x, or with an activation activation(gate) * up of x [..., 2 * I], gates first."""
    size = x.shape[-1] // 2 if activation else x.shape[-1]
    assert not activation or x.shape[-1] == 2 * size, "gate and up have one width"
    rows = x.flatten(0, -2)
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    codes = empty_codes(x, size)
    scales = empty_scales(x, size, blocks)
    if codes.numel():
        block = max(next_power_of_2(size), GROUP)
        if blocks:
            block = min(block, SPAN)
        lines = scales.flatten(0, -2)
        _quantize_rows_kernel[(len(rows), cdiv(size, block))](
            rows,
            codes.view(torch.uint8),
            scales,
            rows.stride(0),
            lines.stride(0),
            lines.stride(1),
            size,
            GATED=activation is not None,
            GELU=activation == "gelu_tanh",
            BLOCKS=blocks,
            HARDWARE=has_fp8(x.device),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **chained(x.device),
        )
    return codes, scales


def _quantize_fake(x: Tensor, blocks: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), empty_scales(x, x.shape[-1], blocks)


quantize_rows = register_op(
    "quantize_rows", quantize_rows_reference, mutates=(), fake=_quantize_fake, cuda=quantize_rows_triton
)


def quantize_with_reference(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., K] with one given scale [] float32: (codes [..., K], the scale for each row [..., 1])."""
    codes = (x.float() / scale).clamp(-MAX_CODE, MAX_CODE).to(FP8)
    return codes, scale.expand(*x.shape[:-1], 1).clone()


@kernel
def _quantize_with_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size]
    scale_ptr,  # one float32
    codes_ptr,  # [rows, size] bytes
    scales_ptr,  # [rows]
    x_stride,
    size,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program quantises BLOCK values of a row."""
    await_previous(CHAINED)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr)
    tl.store(codes_ptr + row * size + column, encode(tl.div_rn(x, scale), HARDWARE), mask=live)
    tl.store(scales_ptr + row, scale, mask=tl.program_id(1) == 0)


def quantize_with_triton(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, size = x.flatten(0, -2), x.shape[-1]
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert scale.dtype == torch.float32 and scale.numel() == 1, "one float32 scale"  # noqa: PT018
    codes, scales = empty_codes(x, size), empty_scales(x, size, blocks=False)
    if codes.numel():
        block = min(next_power_of_2(size), SPAN)
        _quantize_with_kernel[(len(rows), cdiv(size, block))](
            rows,
            scale,
            codes.view(torch.uint8),
            scales,
            rows.stride(0),
            size,
            HARDWARE=has_fp8(x.device),
            BLOCK=block,
            num_warps=max(block // 512, 1),
            **chained(x.device),
        )
    return codes, scales


def _with_fake(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _quantize_fake(x)


quantize_with = register_op(
    "quantize_with", quantize_with_reference, mutates=(), fake=_with_fake, cuda=quantize_with_triton
)
