"""y = x W^T for a few rows of x, without the matrix units: a program keeps its rows of the weight in registers.

A step of few requests is bound by latency. Each program reads its rows of the weight at once, before it waits for the
previous kernel: weights depend on no kernel, so they arrive while the previous ones still run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    kernel,
    launch_next,
    next_power_of_2,
    tl,
)

MAX_ROWS = 4  # the most rows that the kernel takes
DEPTH, DEEP = 2048, 4096  # elements of a row of the weight
COLUMNS = 16384
FEW_COLUMNS = 2048


class VectorTiles(NamedTuple):
    """The share of one program."""

    columns: int  # output columns, a power of two
    warps: int
    early: bool = True  # load the weight before the wait for the previous kernel


def choose_vectors(rows: int, size: int, depth: int) -> VectorTiles | None:
    """Choose tiles for x of `rows` rows and a weight [size, depth]; None if the matrix units are faster.

    Only sizes that were measured on an H200 are served (tests/bench/NOTES.md): with 4 rows the matrix units are faster,
    and larger weights keep the memory busy in any form.
    """
    if rows != 1:
        return None
    if depth <= DEPTH and size <= COLUMNS:
        return VectorTiles(4, 4)
    return VectorTiles(4, 8) if depth <= DEEP and size <= FEW_COLUMNS else None


@kernel
def load_rows(  # type: ignore[no-untyped-def]
    weight_ptr, row, real, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return [rows, BLOCK_K] of a weight [all rows, DEPTH]; zero past the depth and for rows that are not real."""
    depth = tl.arange(0, BLOCK_K)
    read = real[:, None]
    if BLOCK_K != DEPTH:
        read = read & (depth < DEPTH)[None, :]
    return tl.load(weight_ptr + row.to(tl.int64)[:, None] * DEPTH + depth[None, :], mask=read, other=0.0)


@kernel
def load_vector(x_ptr, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return [1, BLOCK_K] float32, zero past the depth."""
    depth = tl.arange(0, BLOCK_K)
    return tl.load(x_ptr + depth, mask=depth < DEPTH, other=0.0).to(tl.float32)[None, :]


@kernel
def _vector_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [ROWS, DEPTH]
    weight_ptr,  # [size, DEPTH]
    bias_ptr,  # [size]; read if BIAS
    out_ptr,  # [ROWS, size]
    x_stride,
    size,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least DEPTH
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
    LEADS: tl.constexpr,  # the next kernel may read what is older than this one before it waits
    CHAINED: tl.constexpr,
):
    """Each program computes COLUMNS columns of all rows."""
    if not EARLY:
        await_results(CHAINED)
    if not LEADS:
        launch_next(CHAINED)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < size
    tile = load_rows(weight_ptr, column, real, DEPTH, BLOCK_K)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
    if EARLY:
        await_results(CHAINED)
    if LEADS:
        launch_next(CHAINED)
    for row in tl.static_range(ROWS):
        x = load_vector(x_ptr + row * x_stride, DEPTH, BLOCK_K)
        out = tl.sum(tile.to(tl.float32) * x, axis=1)
        if BIAS:
            out += bias
        tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=real)


def vector_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: VectorTiles,
    dtype: torch.dtype | None = None,
    leads: bool = False,
) -> Tensor:
    """Return [..., out] in `dtype` (None: that of x) for x [..., in] of at most MAX_ROWS rows.

    The weight must not be written by a kernel that may still run.

    Args:
        leads: the next kernel is launched only after all kernels before this one have ended.
    """
    size, depth = weight.shape
    rows = x.reshape(-1, depth)
    assert rows.shape[0] <= MAX_ROWS, f"{rows.shape[0]} rows"
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous()), "one bias per output"
    out = x.new_empty((*x.shape[:-1], size), dtype=dtype)
    if out.numel():
        _vector_product_kernel[(cdiv(size, tiles.columns),)](
            rows,
            weight,
            weight if bias is None else bias,
            out,
            rows.stride(0),
            size,
            DEPTH=depth,
            BLOCK_K=next_power_of_2(depth),
            BIAS=bias is not None,
            ROWS=rows.shape[0],
            COLUMNS=tiles.columns,
            EARLY=tiles.early,
            LEADS=leads,
            num_warps=tiles.warps,
            **chained(x.device),
        )
    return out
