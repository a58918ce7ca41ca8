"""The norm of a block's output, the residual addition, and the norm of the sum, in one kernel (Gemma, OLMo2)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import await_previous, chained, kernel, next_power_of_2, tl


def add_normed_reference(x: Tensor, residual: Tensor, before: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) + residual; x, residual [..., H], before [H] the weight of the norm."""
    return residual + rms_norm_reference(x, before, eps)


def add_normed_rms_norm_reference(
    x: Tensor, residual: Tensor, before: Tensor, after: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(sum), sum) for sum = rms_norm(x) + residual, by the weights `after` and `before`."""
    total = add_normed_reference(x, residual, before, eps)
    return rms_norm_reference(total, after, eps), total


@kernel
def _add_normed_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size]
    residual_ptr,  # [rows, size]
    before_ptr,  # [size]
    after_ptr,  # [size]; read if AFTER
    out_ptr,  # [rows, size]; written if AFTER
    total_ptr,  # [rows, size]
    x_stride,
    residual_stride,
    size,
    eps,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, which is kept in registers as a whole."""
    await_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=live, other=0.0)
    before = tl.load(before_ptr + column, mask=live, other=0.0).to(tl.float32)
    normed = normed_row(x, before, size, eps, before_ptr.dtype.element_ty)
    total = (normed.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(total_ptr + row * size + column, total, mask=live)
    if AFTER:
        after = tl.load(after_ptr + column, mask=live, other=0.0).to(tl.float32)
        out = normed_row(total, after, size, eps, after_ptr.dtype.element_ty)
        tl.store(out_ptr + row * size + column, out, mask=live)


def add_normed_triton(x: Tensor, residual: Tensor, before: Tensor, eps: float) -> Tensor:
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, residual, before, None, total, total, eps)
    return total


def add_normed_rms_norm_triton(
    x: Tensor, residual: Tensor, before: Tensor, after: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, before, after, out, total, eps)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor,
    before: Tensor,
    after: Tensor | None,
    out: Tensor,
    total: Tensor,
    eps: float,
) -> None:
    assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
    rows, stream = x.flatten(0, -2), residual.flatten(0, -2)
    count, size = rows.shape
    assert rows.stride(1) == stream.stride(1) == 1, "the elements of a row must be adjacent"
    for weight in (before, before if after is None else after):
        assert weight.shape == (size,), f"weight {tuple(weight.shape)} for rows of {size}"
        assert weight.is_contiguous(), "the weight must be contiguous"
        assert weight.dtype in (x.dtype, torch.float32), f"a weight of {weight.dtype} for rows of {x.dtype}"
    if count == 0:
        return
    block = next_power_of_2(size)
    _add_normed_kernel[(count,)](
        rows,
        stream,
        before,
        before if after is None else after,
        out,
        total,
        rows.stride(0),
        stream.stride(0),
        size,
        eps,
        AFTER=after is not None,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(x.device),
    )


def _fake(x: Tensor, residual: Tensor, before: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_both(
    x: Tensor, residual: Tensor, before: Tensor, after: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _fake(x, residual, before, eps), _fake(x, residual, before, eps)


add_normed = register_op("add_normed", add_normed_reference, mutates=(), fake=_fake, cuda=add_normed_triton)
add_normed_rms_norm = register_op(
    "add_normed_rms_norm",
    add_normed_rms_norm_reference,
    mutates=(),
    fake=_fake_both,
    cuda=add_normed_rms_norm_triton,
)
