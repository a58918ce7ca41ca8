"""The sum of the experts' outputs of each token, in a fixed order, by itself and fused with the norm after it."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import add_rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    next_power_of_2,
    tl,
)

BLOCK = 1024


def sum_parts_reference(parts: Tensor, experts: Tensor) -> Tensor:
    """Return [T, H] for parts [T, K, H]; the sum is float32 until it is rounded.

    Args:
        experts: [T, K]; parts of negative ones are left out, whatever they hold.
    """
    parts = parts.masked_fill(experts[:, :, None] < 0, 0.0)
    total = parts[:, 0].float()
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank].float()
    return total.to(parts.dtype)


@kernel
def _sum_of_parts(  # type: ignore[no-untyped-def]
    parts_ptr, experts_ptr, row, column, live, size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the sum of a row's parts, float32; all are loaded, so that no load waits for an expert's index."""
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        expert = tl.load(experts_ptr + row * PARTS + part)
        values = tl.load(parts_ptr + (row * PARTS + part) * size + column, mask=live, other=0.0)
        total += tl.where(expert >= 0, values.to(tl.float32), 0.0)
    return total


@kernel
def _sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [rows, PARTS, size]
    experts_ptr,  # [rows, PARTS] int32
    out_ptr,  # [rows, size]
    size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < size
    total = _sum_of_parts(parts_ptr, experts_ptr, row, column, live, size, PARTS, BLOCK)
    tl.store(out_ptr + row * size + column, total.to(out_ptr.dtype.element_ty), mask=live)


def sum_parts_triton(parts: Tensor, experts: Tensor) -> Tensor:
    rows, count, size = parts.shape
    assert experts.shape == (rows, count) and experts.is_contiguous(), "one expert per part"  # noqa: PT018
    assert parts.is_contiguous(), "the parts must be contiguous"
    out = parts.new_empty((rows, size))
    if out.numel():
        block = min(BLOCK, next_power_of_2(size))
        _sum_parts_kernel[(rows, cdiv(size, block))](
            parts,
            experts,
            out,
            size,
            PARTS=count,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **chained(parts.device),
        )
    return out


def _fake(parts: Tensor, experts: Tensor) -> Tensor:
    return parts.new_empty((parts.shape[0], parts.shape[2]))


sum_parts = register_op("sum_parts", sum_parts_reference, mutates=(), fake=_fake, cuda=sum_parts_triton)


def sum_parts_rms_norm_reference(
    parts: Tensor, experts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(y + residual), y + residual) for y = sum_parts(parts, experts); all [T, H]."""
    return add_rms_norm_reference(sum_parts_reference(parts, experts), residual, weight, eps)


@kernel
def _sum_parts_norm_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [rows, PARTS, size]
    experts_ptr,  # [rows, PARTS] int32
    residual_ptr,  # [rows, size]
    weight_ptr,  # [size]
    out_ptr,  # [rows, size]
    total_ptr,  # [rows, size]
    residual_stride,
    size,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least `size`
    CHAINED: tl.constexpr,
):
    """One program per row, which is kept in registers as a whole."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    dtype = out_ptr.dtype.element_ty
    total = _sum_of_parts(parts_ptr, experts_ptr, row, column, live, size, PARTS, BLOCK)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=live, other=0.0)
    stream = (total.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(total_ptr + row * size + column, stream, mask=live)
    normed = normed_row(stream, weight, size, eps, weight_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, normed, mask=live)


def sum_parts_rms_norm_triton(
    parts: Tensor, experts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, count, size = parts.shape
    assert parts.is_contiguous(), "the parts must be contiguous"
    assert experts.shape == (rows, count) and experts.is_contiguous(), "one expert per part"  # noqa: PT018
    assert residual.shape == (rows, size), f"parts {tuple(parts.shape)} + {tuple(residual.shape)}"
    assert residual.dtype == parts.dtype, f"{parts.dtype} + {residual.dtype}"
    assert residual.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.shape == (size,) and weight.is_contiguous(), f"weight {tuple(weight.shape)}"  # noqa: PT018
    out, total = parts.new_empty((rows, size)), parts.new_empty((rows, size))
    if rows:
        block = next_power_of_2(size)
        _sum_parts_norm_kernel[(rows,)](
            parts,
            experts,
            residual,
            weight,
            out,
            total,
            residual.stride(0),
            size,
            eps,
            PARTS=count,
            BLOCK=block,
            num_warps=row_warps(block),
            **chained(parts.device),
        )
    return out, total


def _fake_norm(
    parts: Tensor, experts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


sum_parts_rms_norm = register_op(
    "sum_parts_rms_norm",
    sum_parts_rms_norm_reference,
    mutates=(),
    fake=_fake_norm,
    cuda=sum_parts_rms_norm_triton,
)
