"""y = x W^T for FP8 rows x and an FP8 weight W with scales, and act(x G^T) * (x U^T): reads the weight once.

The weight's rows are the rows of the matrix units and the rows of x are the columns, as in `linear`. Products of two
e4m3 values are exact in float32. The matrix units of a Hopper GPU add them up with some 14 bits, so after every 128
values (`EXACT_EVERY`) the sum is added to one in float32. That waits for the matrix units in every step, so products
with a scale per output column and without an activation add up several steps first (`Fp8Tiles.together`).

A weight has a scale per output column, by which the complete sum is multiplied, or per block of 128 by 128 values:
then x has a scale per 128 values, and each partial sum is multiplied before it is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.fp8_codes import GROUP, check_product, decode, has_fp8
from common.engine.ops.fp8_tiles import Fp8Tiles
from common.engine.ops.linear import load_tile
from common.engine.ops.silu_mul import activate
from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    copies_in_bulk,
    described,
    full_tile,
    kernel,
    kernel_with_varying,
    launch_next,
    tl,
)

EXACT_EVERY = 128


@kernel
def _load_codes(  # type: ignore[no-untyped-def]
    matrix,  # a descriptor made by `described` if BULK, else a pointer
    first,
    k,
    rows,  # rows of the matrix
    stride,
    DEPTH: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    DECODED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return `load_tile` of codes, if DECODED as float16."""
    tile = load_tile(matrix, first, k, rows, stride, DEPTH, CUT, BULK, ROWS, BLOCK_K)
    if DECODED:
        tile = decode(tile)
    return tile


@kernel
def add_scaled(  # type: ignore[no-untyped-def]
    total, tile, few, column_scale, row_scale, BLOCKS: tl.constexpr, EVERY: tl.constexpr
):
    """Return total [columns, rows] plus the product of two tiles, scaled if BLOCKS."""
    if BLOCKS:
        part = tl.dot(tile, few, max_num_imprecise_acc=EVERY)
        total += part * (column_scale[:, None] * row_scale[None, :])
    else:
        total = tl.dot(tile, few, total, max_num_imprecise_acc=EVERY)
    return total


@kernel
def _step_scales(  # type: ignore[no-untyped-def]
    line, gate_line, up_line, start, group_stride, real_row, real,
    DEPTH: tl.constexpr, BLOCKS: tl.constexpr, GATED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the scales of the rows, the gates and the up projections for the step that begins at column `start`."""
    row_scale = 1.0
    gate_scale = 1.0
    up_scale = 1.0
    if BLOCKS:
        # Past the depth, tiles are zero.
        group = tl.minimum(start // BLOCK_K, (DEPTH + BLOCK_K - 1) // BLOCK_K - 1)
        row_scale = tl.load(line + group * group_stride, mask=real_row, other=0.0)
        gate_scale = tl.load(gate_line + group, mask=real, other=0.0)
        if GATED:
            up_scale = tl.load(up_line + group, mask=real, other=0.0)
    return row_scale, gate_scale, up_scale


@kernel_with_varying("rows", "scale_stride", "group_stride")
def _fp8_product_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, DEPTH]
    row_scales_ptr,  # [rows], or if BLOCKS [rows, groups]
    weight,  # [size, DEPTH], or if GATED [2 * size, DEPTH]: gates, then up projections
    scales_ptr,  # [rows of the weight], or if BLOCKS [blocks, groups]
    bias_ptr,  # [size]; read if BIAS
    out_ptr,  # [rows, size], or float32 [parts, rows, size], whose parts have to be added up
    rows,
    size,  # output columns
    x_stride,
    scale_stride,  # from a row's scale to the next row's
    group_stride,  # from a row's scale to that of the next group
    DEPTH: tl.constexpr,
    PART: tl.constexpr,  # depth of one part, a multiple of BLOCK_K
    CUT: tl.constexpr,  # the last part extends past the depth
    BULK: tl.constexpr,  # x and weight are descriptors
    DECODED: tl.constexpr,  # x and weight are bytes, which are multiplied as float16
    BLOCKS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,  # of the gates; else silu
    EVERY: tl.constexpr,  # at most BLOCK_K
    TOGETHER: tl.constexpr,  # steps that the matrix units add up; 1 if BLOCKS or GATED
    CHAINED: tl.constexpr,
):
    """Each program computes BLOCK_N columns of ROWS rows over one part of the depth."""
    first, begin, top = tl.program_id(0) * BLOCK_N, tl.program_id(1) * PART, tl.program_id(2) * ROWS
    weight_rows = size
    if GATED:
        weight_rows = 2 * size
    await_results(CHAINED)
    row, column = top + tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N)
    real_row, real = row < rows, column < size
    groups: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    line = row_scales_ptr + row * scale_stride
    gate_line, up_line = scales_ptr + column, scales_ptr + size + column
    if BLOCKS:
        gate_line = scales_ptr + column // BLOCK_K * groups
        up_line = scales_ptr + (size + column) // BLOCK_K * groups
    out = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    some = tl.zeros((BLOCK_N, ROWS), tl.float32)  # the sum of the last steps, if they are added up together
    row_scale, gate_scale, up_scale = _step_scales(
        line, gate_line, up_line, begin, group_stride, real_row, real, DEPTH, BLOCKS, GATED, BLOCK_K
    )
    for start in range(begin, begin + PART, BLOCK_K):
        # A step ahead: they arrive while this step multiplies.
        next_row, next_gate, next_up = _step_scales(
            line,
            gate_line,
            up_line,
            start + BLOCK_K,
            group_stride,
            real_row,
            real,
            DEPTH,
            BLOCKS,
            GATED,
            BLOCK_K,
        )
        few = tl.trans(_load_codes(x, top, start, rows, x_stride, DEPTH, CUT, BULK, DECODED, ROWS, BLOCK_K))
        tile = _load_codes(
            weight, first, start, weight_rows, DEPTH, DEPTH, CUT, BULK, DECODED, BLOCK_N, BLOCK_K
        )
        if TOGETHER == 1:
            out = add_scaled(out, tile, few, gate_scale, row_scale, BLOCKS, EVERY)
        else:
            some = tl.dot(tile, few, some)
            if (start // BLOCK_K) % TOGETHER == TOGETHER - 1:
                out += some
                some = tl.zeros((BLOCK_N, ROWS), tl.float32)
        if GATED:
            tile = _load_codes(
                weight, size + first, start, weight_rows, DEPTH, DEPTH, CUT, BULK, DECODED, BLOCK_N, BLOCK_K
            )
            up = add_scaled(up, tile, few, up_scale, row_scale, BLOCKS, EVERY)
        if BLOCKS:
            row_scale, gate_scale = next_row, next_gate
            if GATED:
                up_scale = next_up
    if TOGETHER > 1:
        out += some
    # Not before the wait: the next kernel may read what is older than this one before it waits. After the last step,
    # because layers were up to 6 % slower if later kernels waited beside the steps (tests/bench/NOTES.md).
    launch_next(CHAINED)
    if not BLOCKS:
        row_scale = tl.load(line, mask=real_row, other=0.0)
        out *= tl.load(gate_line, mask=real, other=0.0)[:, None] * row_scale[None, :]
        if GATED:
            up *= tl.load(up_line, mask=real, other=0.0)[:, None] * row_scale[None, :]
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
        # Only the first part adds it.
        out += tl.where(begin == 0, bias, 0.0)[:, None]
    if GATED:
        # Rounded where two separate kernels would round.
        gate = out.to(dtype).to(tl.float32)
        out = activate(gate, GELU) * up.to(dtype).to(tl.float32)
    line = tl.program_id(1) * rows + row
    place = out_ptr + line.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(place, out.to(dtype), mask=real_row[None, :] & real[:, None])


def fp8_product_triton(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tiles: Fp8Tiles,
    dtype: torch.dtype,
    activation: str | None = None,
) -> Tensor:
    """Return [..., out] in `dtype`, or with an activation of gates activation(gate) * up [..., out / 2].

    Args:
        codes: [..., in] e4m3.
        row_scales: [..., 1] float32, or with scales per block [..., ceil(in / 128)], of any strides.
        weight: [out, in] e4m3.
        scales: [out] float32, or [ceil(out / 128), ceil(in / 128)].
        bias: [out].
        activation: of the gates of a gated product, see `gated_linear`; None for a plain product.
    """
    assert tiles.parts == 1, "the reader of a product adds up its parts"
    size = weight.shape[0] // 2 if activation else weight.shape[0]
    out = codes.new_empty((*codes.shape[:-1], size), dtype=dtype)
    _launch(codes, row_scales, weight, scales, bias, out, tiles, activation)
    return out


def fp8_product_parts(
    codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, tiles: Fp8Tiles
) -> Tensor:
    """Divide the depth among programs and return [parts, rows, out] float32, which have to be added up."""
    rows = codes.numel() // codes.shape[-1]
    out = codes.new_empty((tiles.parts, rows, weight.shape[0]), dtype=torch.float32)
    _launch(codes, row_scales, weight, scales, bias, out, tiles, activation=None)
    return out


def _launch(
    codes: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Fp8Tiles,
    activation: str | None,
) -> None:
    size, depth = weight.shape
    rows, blocks = codes.reshape(-1, depth), scales.ndim == 2
    lines = row_scales.reshape(-1, row_scales.shape[-1])
    check_product(rows, lines, weight, scales, bias)
    assert not blocks or tiles.depth == GROUP, "a step has the depth of a block"
    assert tiles.together == 1 or not (blocks or activation), "these add up every step by itself"
    if activation:
        assert bias is None and size % 2 == 0, "gate and up have one width and no bias"  # noqa: PT018
        size //= 2
    if out.numel() == 0:
        return
    part = cdiv(cdiv(depth, tiles.depth), tiles.parts) * tiles.depth
    decoded = not has_fp8(codes.device)
    bulk = tiles.bulk and not decoded and copies_in_bulk(rows, weight)
    if decoded:
        rows, weight = rows.view(torch.uint8), weight.view(torch.uint8)
    _fp8_product_kernel[(cdiv(size, tiles.columns), tiles.parts, cdiv(len(rows), tiles.rows))](
        described(full_tile(rows, tiles.rows), tiles.rows, tiles.depth) if bulk else rows,
        lines,
        described(weight, tiles.columns, tiles.depth) if bulk else weight,
        scales,
        scales if bias is None else bias,
        out,
        len(rows),
        size,
        rows.stride(0),
        lines.stride(0),
        lines.stride(1),
        DEPTH=depth,
        PART=part,
        CUT=part * tiles.parts != depth,
        BULK=bulk,
        DECODED=decoded,
        BLOCKS=blocks,
        BIAS=bias is not None,
        ROWS=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        EVERY=min(EXACT_EVERY, tiles.depth),
        TOGETHER=tiles.together,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **chained(codes.device),
    )
