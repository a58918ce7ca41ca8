"""y = x W^T and act(x G^T) * (x U^T) for one FP8 row x, without the matrix units.

A step of one request is bound by latency. Each program reads its rows of the weight into registers before it waits for
the previous kernel: weights depend on no kernel, so they arrive while the previous ones still run. Codes are converted
to float32, in which products are added up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import check_product, decode, has_fp8
from common.engine.ops.silu_mul import activate
from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    kernel,
    launch_next,
    next_power_of_2,
    tl,
)
from common.engine.ops.vector_products import load_rows

# Sizes that were measured on an H200 (tests/bench/NOTES.md); with a depth of 14,336 the matrix units are faster.
MIN_SIZE, MIN_DEPTH, MAX_DEPTH = 2048, 2048, 4096
WIDE = 6144  # output columns from which a program computes fewer of them


class Fp8Vectors(NamedTuple):
    """The share of one program."""

    columns: int  # output columns, a power of two of at most GROUP
    warps: int


def choose_fp8_vectors(rows: int, size: int, depth: int, gated: bool = False) -> Fp8Vectors | None:
    """Choose the shares for x of `rows` rows and a weight [size, depth]; None if the matrix units serve it.

    Args:
        gated: the weight has gates and up projections, of which a program multiplies equally many.
    """
    if rows != 1 or size < MIN_SIZE or not MIN_DEPTH <= depth <= MAX_DEPTH:
        return None
    vectors = Fp8Vectors(2 if size >= WIDE else 4, 4)
    return None if gated and (size // 2) % vectors.columns else vectors


@kernel
def _values(codes, DECODED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 values of codes, which are bytes if DECODED."""
    if DECODED:
        codes = decode(codes)
    return codes.to(tl.float32)


@kernel
def _dot(  # type: ignore[no-untyped-def]
    tile, x, scales_ptr, first, DEPTH: tl.constexpr, BLOCKS: tl.constexpr, DECODED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums [columns] of codes [columns, BLOCK_K] times x [BLOCK_K].

    Args:
        scales_ptr: of the weight's blocks, read if BLOCKS.
        first: the first row of the weight; all rows of `tile` are in its block.
    """
    if BLOCKS:
        depth = tl.arange(0, BLOCK_K)
        groups: tl.constexpr = (DEPTH + 127) // 128
        x = x * tl.load(scales_ptr + first // 128 * groups + depth // 128, mask=depth < DEPTH, other=0.0)
    return tl.sum(_values(tile, DECODED) * x[None, :], axis=1)


@kernel
def _fp8_vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [DEPTH] codes
    row_scales_ptr,  # [1], or if BLOCKS [groups]
    weight_ptr,  # [size, DEPTH] codes, or if GATED [2 * size, DEPTH]: gates, then up projections
    scales_ptr,  # [rows of the weight], or if BLOCKS [blocks, groups]
    bias_ptr,  # [size]; read if BIAS
    out_ptr,  # [size]
    size,  # output columns
    group_stride,  # from a scale of x to that of the next group
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least DEPTH
    DECODED: tl.constexpr,  # codes are bytes
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,  # of the gates; else silu
    CHAINED: tl.constexpr,
):
    """Each program computes COLUMNS columns."""
    first = tl.program_id(0) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    real = column < size
    depth = tl.arange(0, BLOCK_K)
    live = depth < DEPTH
    tile = load_rows(weight_ptr, column, real, DEPTH, BLOCK_K)
    if GATED:
        up_tile = load_rows(weight_ptr, size + column, real, DEPTH, BLOCK_K)
    if not BLOCKS:
        scale = tl.load(scales_ptr + column, mask=real, other=0.0)
        if GATED:
            up_scale = tl.load(scales_ptr + size + column, mask=real, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    await_results(CHAINED)
    # Not before the wait: the next kernel may read what is older than this one before it waits.
    launch_next(CHAINED)
    x = _values(tl.load(x_ptr + depth, mask=live, other=0.0), DECODED)
    if BLOCKS:
        x = x * tl.load(row_scales_ptr + depth // 128 * group_stride, mask=live, other=0.0)
    else:
        # Not after the sums: loads stay after the barriers of a sum, and their latency adds to every product.
        row_scale = tl.load(row_scales_ptr)
    out = _dot(tile, x, scales_ptr, first, DEPTH, BLOCKS, DECODED, BLOCK_K)
    if not BLOCKS:
        out *= scale * row_scale
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        out += bias
    if GATED:
        up = _dot(up_tile, x, scales_ptr, size + first, DEPTH, BLOCKS, DECODED, BLOCK_K)
        if not BLOCKS:
            up *= up_scale * row_scale
        # Rounded where two separate kernels would round.
        out = activate(out.to(dtype).to(tl.float32), GELU) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + column, out.to(dtype), mask=real)


def fp8_vector_triton(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    vectors: Fp8Vectors,
    dtype: torch.dtype,
    activation: str | None = None,
) -> Tensor:
    """Return [..., out] in `dtype`, or with an activation of gates activation(gate) * up [..., out / 2], for one row.

    The weight must not be written by a kernel that may still run.

    Args:
        codes: [..., in] e4m3.
        row_scales: [..., 1] float32, or with scales per block [..., ceil(in / 128)].
        weight: [out, in] e4m3.
        scales: [out] float32, or [ceil(out / 128), ceil(in / 128)].
        bias: [out].
        activation: of the gates of a gated product, see `gated_linear`; None for a plain product.
    """
    size, depth = weight.shape
    blocks = scales.ndim == 2
    assert codes.numel() == depth and codes.stride(-1) == 1, "one row, whose elements are adjacent"  # noqa: PT018
    check_product(codes.reshape(1, depth), row_scales.reshape(1, -1), weight, scales, bias)
    if activation:
        assert bias is None and size % 2 == 0, "gate and up have one width and no bias"  # noqa: PT018
        size //= 2
        assert size % vectors.columns == 0, "the columns of a program are in one block of scales"
    out = codes.new_empty((*codes.shape[:-1], size), dtype=dtype)
    decoded = not has_fp8(codes.device)
    row, row_scales = codes.reshape(-1), row_scales.reshape(-1)
    if decoded:
        row, weight = row.view(torch.uint8), weight.view(torch.uint8)
    _fp8_vector_kernel[(cdiv(size, vectors.columns),)](
        row,
        row_scales,
        weight,
        scales,
        scales if bias is None else bias,
        out,
        size,
        row_scales.stride(0),
        DEPTH=depth,
        BLOCK_K=next_power_of_2(depth),
        DECODED=decoded,
        BLOCKS=blocks,
        BIAS=bias is not None,
        COLUMNS=vectors.columns,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        num_warps=vectors.warps,
        **chained(codes.device),
    )
    return out
