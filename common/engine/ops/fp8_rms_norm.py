"""RMSNorm whose result is quantised to FP8 for the next product: `rms_norm` for FP8 weights.

What is quantised is first rounded to the dtype of the activations, so the fused form has the results of the two
operations one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, GROUP, empty_codes, empty_scales, has_fp8, store_codes
from common.engine.ops.fp8_rows import quantize_rows_reference
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import await_previous, chained, kernel_with_varying, next_power_of_2, tl


def fp8_rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, normed): `quantize_rows` of rms_norm(x), and rms_norm(x) itself; all [..., H]."""
    normed = rms_norm_reference(x, weight, eps)
    return *quantize_rows_reference(normed, blocks), normed


def fp8_add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, total): `quantize_rows` of rms_norm(total), and total = x + residual; all [..., H]."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps)
    return *quantize_rows_reference(normed, blocks), total


@kernel_with_varying("scale_stride", "group_stride")
def _fp8_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size], or if PARTS float32 [PARTS, rows, size]
    residual_ptr,  # [rows, size]; read if ADD
    weight_ptr,  # [size]
    dense_ptr,  # [rows, size]: if ADD the sum x + residual, else the norm
    codes_ptr,  # [rows, size] bytes
    scales_ptr,
    x_stride,
    part_stride,
    residual_stride,
    scale_stride,
    group_stride,
    size,
    eps,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # 0: x is whole
    BLOCKS: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, which is kept in registers as a whole."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row * x_stride + column, mask=live, other=0.0)
    # Rounded as a product would be.
    x = x.to(dense_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(dense_ptr + row * size + column, x, mask=live)
    normed = normed_row(x, weight, size, eps, weight_ptr.dtype.element_ty)
    if not ADD:
        tl.store(dense_ptr + row * size + column, normed, mask=live)
    line = scales_ptr + row * scale_stride
    wide = normed.to(tl.float32)
    store_codes(wide, codes_ptr + row * size, line, group_stride, 0, size, BLOCKS, HARDWARE, BLOCK)


def fp8_rms_norm_triton(x: Tensor, weight: Tensor, eps: float, blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.flatten(0, -2)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    codes, scales = _norm(rows, rows, weight, normed, eps, blocks, add=False)
    return codes, scales, normed


def fp8_add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, stream = x.flatten(0, -2), residual.flatten(0, -2)
    return (*_norm(rows, stream, weight, total, eps, blocks, add=True), total)


def fp8_add_parts_rms_norm_triton(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`fp8_add_rms_norm` for x in parts [parts, rows, H] float32."""
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    stream = residual.flatten(0, -2)
    assert parts.shape[1:] == stream.shape, f"parts {tuple(parts.shape)} + {tuple(stream.shape)}"
    assert parts.is_contiguous(), "the parts must be contiguous"
    return (*_norm(parts[0], stream, weight, total, eps, blocks, True, len(parts)), total)


def _norm(
    rows: Tensor,
    residual: Tensor,
    weight: Tensor,
    dense: Tensor,
    eps: float,
    blocks: bool,
    add: bool,
    parts: int = 0,
) -> tuple[Tensor, Tensor]:
    count, size = rows.shape
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert residual.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.shape == (size,), f"weight {tuple(weight.shape)} for rows of {size}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert weight.dtype in (dense.dtype, torch.float32), (
        f"a weight of {weight.dtype} for rows of {dense.dtype}"
    )
    codes, scales = empty_codes(dense, size), empty_scales(dense, size, blocks)
    if count:
        block, lines = max(next_power_of_2(size), GROUP), scales.flatten(0, -2)
        _fp8_rms_norm_kernel[(count,)](
            rows,
            residual,
            weight,
            dense,
            codes.view(torch.uint8),
            scales,
            rows.stride(0),
            rows.numel(),
            residual.stride(0),
            lines.stride(0),
            lines.stride(1),
            size,
            eps,
            ADD=add,
            PARTS=parts,
            BLOCKS=blocks,
            HARDWARE=has_fp8(rows.device),
            BLOCK=block,
            num_warps=row_warps(block),
            **chained(rows.device),
        )
    return codes, scales


def _fake(x: Tensor, weight: Tensor, eps: float, blocks: bool) -> tuple[Tensor, Tensor, Tensor]:
    dense = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.empty_like(dense, dtype=FP8), empty_scales(x, x.shape[-1], blocks), dense


def _fake_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(x, weight, eps, blocks)


fp8_rms_norm = register_op(
    "fp8_rms_norm", fp8_rms_norm_reference, mutates=(), fake=_fake, cuda=fp8_rms_norm_triton
)
fp8_add_rms_norm = register_op(
    "fp8_add_rms_norm", fp8_add_rms_norm_reference, mutates=(), fake=_fake_add, cuda=fp8_add_rms_norm_triton
)
