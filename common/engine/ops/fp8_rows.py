"""Quantise rows to e4m3 with dynamic scales: by themselves, and fused with the activation or the norm before them.

A row has one scale, or one per 128 values for weights with scales per block. A scale maps the largest value of its
group to 448. Values are first rounded to the dtype of the rows, so a fused form has the results of the two operations
one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, LARGEST, encode, has_fp8
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from common.engine.ops.row_norm import normed_row, row_warps
from common.engine.ops.silu_mul import activate, gelu_mul_reference, silu_mul_reference
from common.engine.ops.triton_kernel import await_previous, cdiv, chained, kernel, next_power_of_2, tl

GROUP = 128  # values that share a scale, if a row has several
LEAST = 1e-12  # the largest value of a group counts as at least this, so that a scale is never zero
SPAN = 2048  # values per program, if a row has several scales


def empty_scales(x: Tensor, size: int, grouped: bool) -> Tensor:
    """Return uninitialised scales for rows of `size` values, as many as x has.

    Scales of groups have the strides of a tensor [groups, rows], as torch's product of blocks demands.
    """
    lead, rows = x.shape[:-1], x.shape[:-1].numel()
    if not grouped:
        return x.new_empty((*lead, 1), dtype=torch.float32)
    return x.new_empty((cdiv(size, GROUP), rows), dtype=torch.float32).T.unflatten(0, lead)


def quantise_rows_reference(x: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return codes [..., K] e4m3 and scales [..., 1] float32, or if `grouped` [..., ceil(K / 128)], for x [..., K]."""
    size = x.shape[-1]
    group = GROUP if grouped else size
    groups = cdiv(size, group)
    padded = torch.nn.functional.pad(x.float(), (0, groups * group - size)).unflatten(-1, (groups, group))
    largest = padded.abs().amax(-1).clamp(min=LEAST)
    codes = (padded * (LARGEST / largest).unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FP8)
    scales = empty_scales(x, size, grouped).copy_(largest / LARGEST)
    return codes.flatten(-2)[..., :size].clone(memory_format=torch.contiguous_format), scales


def activated_quantise_reference(gate_up: Tensor, gelu: bool, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return `quantise_rows` of silu(gate) * up for gate_up [..., 2 * I], gates first.

    Args:
        gelu: the tanh form of gelu instead of silu.
    """
    activated = gelu_mul_reference if gelu else silu_mul_reference
    return quantise_rows_reference(activated(gate_up), grouped)


def rms_norm_quantise_reference(
    x: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rms_norm(x), its codes and its scales."""
    normed = rms_norm_reference(x, weight, eps)
    return (normed, *quantise_rows_reference(normed, grouped))


def add_rms_norm_quantise_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales of rms_norm(x + residual), and the sum."""
    normed, total = add_rms_norm_reference(x, residual, weight, eps)
    return (*quantise_rows_reference(normed, grouped), total)


@kernel
def store_quantised(  # type: ignore[no-untyped-def]
    x,  # [BLOCK] float32, zero past the end of the row
    codes_ptr,  # of the row
    scales_ptr,  # of the row
    group_stride,
    begin,  # column of x's first value; if not GROUPED 0
    size,
    GROUPED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the codes and scales of a row, or if GROUPED of a part of it."""
    width: tl.constexpr = 128 if GROUPED else BLOCK
    count: tl.constexpr = BLOCK // width
    values = tl.reshape(x, (count, width))
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-12)
    codes = encode(values * tl.div_rn(448.0 + tl.zeros_like(largest), largest)[:, None], HARDWARE)
    group = tl.arange(0, count)
    column = begin + group[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(codes_ptr + column, codes, mask=column < size)
    place = begin // width + group
    scales = tl.div_rn(largest, 448.0 + tl.zeros_like(largest))
    tl.store(scales_ptr + place * group_stride, scales, mask=place * width < size)


@kernel
def _quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, size], or if GATED [rows, 2 * size]
    codes_ptr,  # [rows, size] bytes
    scales_ptr,
    x_stride,
    scale_stride,
    group_stride,
    size,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    GROUPED: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program per row, or if GROUPED per BLOCK values of a row."""
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
    store_quantised(x, codes_ptr + row * size, line, group_stride, begin, size, GROUPED, HARDWARE, BLOCK)


@kernel
def _rms_norm_quantise_kernel(  # type: ignore[no-untyped-def]
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
    GROUPED: tl.constexpr,
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
    store_quantised(wide, codes_ptr + row * size, line, group_stride, 0, size, GROUPED, HARDWARE, BLOCK)


def _lines(scales: Tensor) -> Tensor:
    """Return scales [..., groups] as [rows, groups]."""
    return scales.flatten(0, -2)


def _quantise(x: Tensor, grouped: bool, gated: bool, gelu: bool) -> tuple[Tensor, Tensor]:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    assert not gated or x.shape[-1] == 2 * size, "gate and up have one width"
    rows = x.flatten(0, -2)
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    codes = x.new_empty((*x.shape[:-1], size), dtype=FP8)
    scales = empty_scales(x, size, grouped)
    if codes.numel():
        block = max(next_power_of_2(size), GROUP)
        if grouped:
            block = min(block, SPAN)
        lines = _lines(scales)
        _quantise_rows_kernel[(len(rows), cdiv(size, block))](
            rows,
            codes.view(torch.uint8),
            scales,
            rows.stride(0),
            lines.stride(0),
            lines.stride(1),
            size,
            GATED=gated,
            GELU=gelu,
            GROUPED=grouped,
            HARDWARE=has_fp8(x.device),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **chained(x.device),
        )
    return codes, scales


def quantise_rows_triton(x: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
    return _quantise(x, grouped, gated=False, gelu=False)


def activated_quantise_triton(gate_up: Tensor, gelu: bool, grouped: bool) -> tuple[Tensor, Tensor]:
    return _quantise(gate_up, grouped, gated=True, gelu=gelu)


def rms_norm_quantise_triton(
    x: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.flatten(0, -2)
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    codes, scales = _norm(rows, rows, weight, normed, eps, grouped, add=False)
    return normed, codes, scales


def add_rms_norm_quantise_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    assert x.shape == residual.shape, f"{tuple(x.shape)} + {tuple(residual.shape)}"
    assert x.dtype == residual.dtype, f"{x.dtype} + {residual.dtype}"
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, stream = x.flatten(0, -2), residual.flatten(0, -2)
    return (*_norm(rows, stream, weight, total, eps, grouped, add=True), total)


def add_parts_rms_norm_quantise_triton(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm_quantise` for x in parts [parts, rows, H] float32."""
    total = torch.empty_like(residual, memory_format=torch.contiguous_format)
    stream = residual.flatten(0, -2)
    assert parts.shape[1:] == stream.shape, f"parts {tuple(parts.shape)} + {tuple(stream.shape)}"
    assert parts.is_contiguous(), "the parts must be contiguous"
    return (*_norm(parts[0], stream, weight, total, eps, grouped, True, len(parts)), total)


def _norm(
    rows: Tensor,
    residual: Tensor,
    weight: Tensor,
    dense: Tensor,
    eps: float,
    grouped: bool,
    add: bool,
    parts: int = 0,
) -> tuple[Tensor, Tensor]:
    count, size = rows.shape
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert residual.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.shape == (size,), f"weight {tuple(weight.shape)} for rows of {size}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert weight.dtype in (dense.dtype, torch.float32), f"a weight of {weight.dtype} for rows of {dense.dtype}"
    codes, scales = torch.empty_like(dense, dtype=FP8), empty_scales(dense, size, grouped)
    if count:
        block, lines = max(next_power_of_2(size), GROUP), _lines(scales)
        _rms_norm_quantise_kernel[(count,)](
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
            GROUPED=grouped,
            HARDWARE=has_fp8(rows.device),
            BLOCK=block,
            num_warps=row_warps(block),
            **chained(rows.device),
        )
    return codes, scales


def _fake(x: Tensor, grouped: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FP8), empty_scales(x, x.shape[-1], grouped)


def _fake_activated(gate_up: Tensor, gelu: bool, grouped: bool) -> tuple[Tensor, Tensor]:
    size = gate_up.shape[-1] // 2
    return gate_up.new_empty((*gate_up.shape[:-1], size), dtype=FP8), empty_scales(gate_up, size, grouped)


def _fake_norm(x: Tensor, weight: Tensor, eps: float, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (torch.empty_like(x, memory_format=torch.contiguous_format), *_fake(x, grouped))


def _fake_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake(x, grouped), torch.empty_like(x, memory_format=torch.contiguous_format))


quantise_rows = register_op(
    "quantise_rows", quantise_rows_reference, mutates=(), fake=_fake, cuda=quantise_rows_triton
)
activated_quantise = register_op(
    "activated_quantise",
    activated_quantise_reference,
    mutates=(),
    fake=_fake_activated,
    cuda=activated_quantise_triton,
)
rms_norm_quantise = register_op(
    "rms_norm_quantise",
    rms_norm_quantise_reference,
    mutates=(),
    fake=_fake_norm,
    cuda=rms_norm_quantise_triton,
)
add_rms_norm_quantise = register_op(
    "add_rms_norm_quantise",
    add_rms_norm_quantise_reference,
    mutates=(),
    fake=_fake_add_norm,
    cuda=add_rms_norm_quantise_triton,
)
