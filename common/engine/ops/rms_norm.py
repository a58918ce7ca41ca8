"""RMSNorm, by itself and fused with the residual addition before it (arXiv 1910.07467).

The sum of the fused form is a new tensor: the stream that entered a layer may still be needed (auxiliary hidden
states, a graph's static input), and writing elsewhere moves the same number of bytes.

The dtype of the weight says when the result is rounded to the dtype of the rows. A weight of the rows' dtype multiplies
rounded values, as in Llama. A float32 weight multiplies before the rounding, as in Gemma, whose weight is 1 + w.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.triton_kernel import await_previous, chained, kernel, next_power_of_2, tl


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / rms(x) * weight [H], in x's dtype; the mean square is float32."""
    if x.dtype == weight.dtype == torch.float32:
        # The same operations in one call: on a CPU a norm of few rows is mostly calls.
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(weight.dtype)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); all [..., H]."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@kernel
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size], or if PARTS float32 [PARTS, rows, size]
    residual_ptr,  # [rows, size]; read if ADD
    weight_ptr,  # [size]
    out_ptr,  # [rows, size]
    total_ptr,  # [rows, size]; written if ADD
    x_stride,
    part_stride,
    residual_stride,
    size,
    eps,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,  # 0: x is whole
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
    x = x.to(out_ptr.dtype.element_ty)  # rounded as a product would be
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + column, x, mask=live)
    normed = normed_row(x, weight, size, eps, weight_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + column, normed, mask=live)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.flatten(0, -2)  # a view if the rows have one stride
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(rows, rows, weight, out, out, eps, add=False)
    return out


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x.flatten(0, -2), residual.flatten(0, -2), weight, out, total, eps, add=True)
    return out, total


def add_parts_rms_norm_triton(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` for x in parts [parts, rows, H] float32; their sum is rounded to the dtype of `residual`."""
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    stream = residual.flatten(0, -2)
    assert parts.shape[1:] == stream.shape, f"parts {tuple(parts.shape)} + {tuple(stream.shape)}"
    assert parts.is_contiguous(), "the parts must be contiguous"
    _launch(parts[0], stream, weight, out, total, eps, add=True, parts=len(parts))
    return out, total


def _launch(
    rows: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    add: bool,
    parts: int = 0,
) -> None:
    count, size = rows.shape
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert residual.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.shape == (size,), f"weight {tuple(weight.shape)} for rows of {size}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert weight.dtype in (out.dtype, torch.float32), f"a weight of {weight.dtype} for rows of {out.dtype}"
    if count == 0:
        return
    block = next_power_of_2(size)
    _rms_norm_kernel[(count,)](
        rows,
        residual,
        weight,
        out,
        total,
        rows.stride(0),
        rows.numel(),
        residual.stride(0),
        size,
        eps,
        ADD=add,
        PARTS=parts,
        BLOCK=block,
        num_warps=row_warps(block),
        **chained(rows.device),
    )


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _fake(x, weight, eps), _fake(x, weight, eps)


rms_norm = register_op("rms_norm", rms_norm_reference, mutates=(), fake=_fake, cuda=rms_norm_triton)
add_rms_norm = register_op(
    "add_rms_norm", add_rms_norm_reference, mutates=(), fake=_fake_add, cuda=add_rms_norm_triton
)
