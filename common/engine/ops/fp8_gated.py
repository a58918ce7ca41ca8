"""act(x G^T) * (x U^T), quantised, for FP8 rows x and an FP8 weight of gates G and up projections U.

For few rows the activation is part of the product. The kernel here serves up to 64 rows and weights scaled per channel:
each program multiplies its gates over the whole depth, then its up projections, in one loop. So the matrix units of a
Hopper GPU have one accumulator, and a step can begin while the previous one still multiplies. With an accumulator for
gates and one for up projections, as in `fp8_product`, x is read once instead of twice, but each step waits for the
matrix units (tests/bench/NOTES.md, "Gated FP8 products with one accumulator").
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, check_product, empty_scales
from common.engine.ops.fp8_linear import fp8_product_cuda, fp8_product_reference
from common.engine.ops.fp8_product import fp8_product_triton
from common.engine.ops.fp8_rows import quantize_rows_triton
from common.engine.ops.fp8_silu_mul import fp8_gate_reference, fp8_gate_triton
from common.engine.ops.fp8_tiles import Fp8Tiles, choose_fp8_gated_tiles
from common.engine.ops.fp8_vectors import choose_fp8_vectors, fp8_vector_triton
from common.engine.ops.linear import load_tile
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import room_of
from common.engine.ops.silu_mul import activate
from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    copies_in_bulk,
    described,
    full_tile,
    kernel_with_varying,
    launch_next,
    multiprocessors,
    tl,
)


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


@kernel_with_varying("rows")
def _fp8_gated_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, DEPTH]
    row_scales_ptr,  # [rows]
    weight,  # [2 * size, DEPTH]: gates, then up projections
    scales_ptr,  # [2 * size]
    out_ptr,  # [rows, size]
    rows,
    size,  # output columns
    x_stride,
    DEPTH: tl.constexpr,  # a multiple of TOGETHER * BLOCK_K
    BULK: tl.constexpr,  # x and weight are descriptors
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GELU: tl.constexpr,  # of the gates; else silu
    TOGETHER: tl.constexpr,  # steps that the matrix units add up
    CHAINED: tl.constexpr,
):
    """Each program computes BLOCK_N columns of ROWS rows."""
    first, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * ROWS
    await_results(CHAINED)
    row, column = top + tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N)
    real = column < size
    steps: tl.constexpr = DEPTH // BLOCK_K
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)  # that of the gates in the first half of the steps
    some = tl.zeros((BLOCK_N, ROWS), tl.float32)  # the sum of the last steps
    for step in range(2 * steps):
        start, begin = step * BLOCK_K, first
        if step >= steps:
            start, begin = (step - steps) * BLOCK_K, first + size
        few = tl.trans(load_tile(x, top, start, rows, x_stride, DEPTH, False, BULK, ROWS, BLOCK_K))
        tile = load_tile(weight, begin, start, 2 * size, DEPTH, DEPTH, False, BULK, BLOCK_N, BLOCK_K)
        some = tl.dot(tile, few, some)
        if step % TOGETHER == TOGETHER - 1:
            up += some
            some = tl.zeros((BLOCK_N, ROWS), tl.float32)
            if step == steps - 1:
                gate = up
                up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    # Not before the wait, and after the last step, as in `fp8_product`.
    launch_next(CHAINED)
    row_scale = tl.load(row_scales_ptr + row, mask=row < rows, other=0.0)
    gate *= tl.load(scales_ptr + column, mask=real, other=0.0)[:, None] * row_scale[None, :]
    up *= tl.load(scales_ptr + size + column, mask=real, other=0.0)[:, None] * row_scale[None, :]
    dtype = out_ptr.dtype.element_ty
    # Rounded where two separate kernels would round.
    inner = activate(gate.to(dtype).to(tl.float32), GELU) * up.to(dtype).to(tl.float32)
    place = out_ptr + row.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(place, inner.to(dtype), mask=(row < rows)[None, :] & real[:, None])


def fp8_gated_triton(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    tiles: Fp8Tiles,
    dtype: torch.dtype,
    activation: str,
) -> Tensor:
    """Return activation(gate) * up [..., I] in `dtype`, by two accumulators if `tiles.together` is 1.

    Args:
        codes: [..., in] e4m3.
        row_scales: see `fp8_product_triton`; with one accumulator [..., 1] float32.
        weight: [2 * I, in] e4m3, gates first.
        scales: see `fp8_product_triton`; with one accumulator [2 * I] float32.
        activation: of the gates, see `gated_linear`.
    """
    if tiles.together == 1:
        return fp8_product_triton(codes, row_scales, weight, scales, None, tiles, dtype, activation)
    size, depth = weight.shape[0] // 2, weight.shape[1]
    rows, lines = codes.reshape(-1, depth), row_scales.reshape(-1, row_scales.shape[-1])
    assert scales.ndim == 1, f"weight scales {tuple(scales.shape)} of blocks"
    check_product(rows, lines, weight, scales)
    assert weight.shape[0] == 2 * size, "gate and up have one width"
    assert depth % (tiles.depth * tiles.together) == 0, f"a depth of {depth} cuts a sum"
    assert tiles.parts == 1, "an activation needs the whole sum"
    out = codes.new_empty((*codes.shape[:-1], size), dtype=dtype)
    if out.numel() == 0:
        return out
    bulk = tiles.bulk and copies_in_bulk(rows, weight)
    _fp8_gated_kernel[(cdiv(size, tiles.columns), cdiv(len(rows), tiles.rows))](
        described(full_tile(rows, tiles.rows), tiles.rows, tiles.depth) if bulk else rows,
        lines.contiguous(),
        described(weight, tiles.columns, tiles.depth) if bulk else weight,
        scales,
        out,
        len(rows),
        size,
        rows.stride(0),
        DEPTH=depth,
        BULK=bulk,
        ROWS=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth,
        GELU=activation == "gelu_tanh",
        TOGETHER=tiles.together,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **chained(codes.device),
    )
    return out


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
