"""y = x W^T + b, and silu(x G^T) * (x U^T), for few rows of x: a decode step is one read of the weights.

Such a product is bound by memory. Wide matrices gain from this kernel: it is launched while the one before still runs
(`await_previous`), and it takes the activation with it, which would be a launch of its own. Narrow ones are left to
cuBLAS, which divides their depth, too, or to `linear_norm` (tests/bench/NOTES.md). A row's result does not depend on
its company in a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.silu_mul import silu_mul_reference, silu_mul_triton
from common.engine.ops.triton_kernel import await_previous, cdiv, chained, kernel_with_varying, tl

FEW = 16  # rows: what a tile of the matrix units has at least


class Tiles(NamedTuple):
    """How one weight matrix is divided; measured on an H200."""

    columns: int  # of the output, per program
    depth: int  # of a step
    warps: int
    stages: int
    ahead: int = 0  # inputs whose weights are asked for before x is there
    parts: int = 1  # of the depth, a program each
    rows: int = FEW  # of x, at most


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return F.linear(x, weight, bias)


@kernel_with_varying("rows")
def _linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, DEPTH]
    weight_ptr,  # [size, DEPTH], or where GATED [2 * size, DEPTH]: gates, then what they are multiplied with
    bias_ptr,  # [size]; read where BIAS
    out_ptr,  # [rows, size], or float32 [parts, rows, size], to be added up
    rows,
    size,  # of the output
    x_stride,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,  # of the depth, a multiple of BLOCK_K
    CUT: tl.constexpr,  # the parts reach beyond the depth
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # at least `rows`
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    GATED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program has BLOCK_N columns of all rows, and one part of the depth."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = column < size
    begin = tl.program_id(1) * PART
    weights = weight_ptr + column.to(tl.int64)[:, None] * DEPTH
    if CHAINED and AHEAD > 0:
        line = tl.arange(0, AHEAD // 64) * 64  # 128 bytes of 2 bytes each
        wanted = weight_ptr + tl.where(real, column, 0).to(tl.int64)[:, None] * DEPTH + begin + line[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [wanted], tl.int32, False, 1
        )
    await_previous(CHAINED)
    row, depth = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    inputs = x_ptr + row.to(tl.int64)[:, None] * x_stride
    out = tl.zeros((ROWS, BLOCK_N), tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, PART, BLOCK_K):
        k = begin + start + depth
        read_x, read_weight = (row < rows)[:, None], real[:, None]
        if CUT:
            inside = (k < DEPTH)[None, :]
            read_x, read_weight = read_x & inside, read_weight & inside
        x = tl.load(inputs + k[None, :], mask=read_x, other=0.0)
        weight = tl.load(weights + k[None, :], mask=read_weight, other=0.0)
        out = tl.dot(x, tl.trans(weight), out, input_precision="ieee")
        if GATED:
            second = weights + size.to(tl.int64) * DEPTH
            weight = tl.load(second + k[None, :], mask=read_weight, other=0.0)
            up = tl.dot(x, tl.trans(weight), up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        out += tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if GATED:  # rounded where two kernels would round
        gate = out.to(dtype).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    line = tl.program_id(1) * rows + row
    place = out_ptr + line.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(place, out.to(dtype), mask=(row < rows)[:, None] & real[None, :])


def choose_tiles(rows: int, size: int) -> Tiles | None:
    """For x of so many rows and a weight of `size` rows; None where cuBLAS is faster."""
    if rows > FEW or size < 16384:
        return None
    return Tiles(32, 256, 4, 3) if size < 65536 else Tiles(64, 128, 4, 4)


def choose_gated_tiles(rows: int, size: int) -> Tiles | None:
    """The same for `gated_linear`."""
    if FEW < rows <= 2 * FEW and size >= 16384:
        return Tiles(64, 128, 8, 3, rows=2 * FEW)
    return choose_tiles(rows, size)


def linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, gated: bool = False
) -> Tensor:
    """At most `tiles.rows` rows. `gated`: see `gated_linear`. Of one part: see `linear_parts`."""
    assert tiles.parts == 1, "the parts of a product are added up by what reads it"
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty((*x.shape[:-1], size))
    _launch(x, weight, bias, out, tiles, gated)
    return out


def linear_parts(x: Tensor, weight: Tensor, tiles: Tiles) -> Tensor:
    """The depth divided among programs: [parts, rows, size] float32, to be added up; see `linear_add_rms_norm`."""
    out = x.new_empty((tiles.parts, rows_of(x), weight.shape[0]), dtype=torch.float32)
    _launch(x, weight, None, out, tiles, gated=False)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    gated: bool,
) -> None:
    size, depth = weight.shape
    rows = x.reshape(-1, depth)
    assert rows.shape[0] <= tiles.rows, f"{rows.shape[0]} rows, a tile has {tiles.rows}"
    assert rows.dtype == weight.dtype, f"{rows.dtype} times {weight.dtype}"
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous()), "one bias per output"
    if gated:
        assert bias is None and size % 2 == 0, "gate and up have one width and no bias"  # noqa: PT018
        size //= 2
    if out.numel() == 0:
        return
    part = cdiv(cdiv(depth, tiles.depth), tiles.parts) * tiles.depth
    _linear_kernel[(cdiv(size, tiles.columns), tiles.parts)](
        rows,
        weight,
        weight if bias is None else bias,
        out,
        rows.shape[0],
        size,
        rows.stride(0),
        DEPTH=depth,
        PART=part,
        CUT=part * tiles.parts != depth,
        BIAS=bias is not None,
        ROWS=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth,
        AHEAD=min(tiles.ahead, 1 << (depth.bit_length() - 1)),
        GATED=gated,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **chained(x.device),
    )


def halves(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernel is for them: 16 bits, and a weight in one piece."""
    return x.dtype in (torch.float16, torch.bfloat16) and weight.is_contiguous()


def rows_of(x: Tensor) -> int:
    """[..., in]: how many there are of the last axis."""
    return x.numel() // x.shape[-1]


def _linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tiles = choose_tiles(rows_of(x), weight.shape[0])
    if tiles is not None and halves(x, weight):
        return linear_triton(x, weight, bias, tiles)
    return F.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear = register_op("linear", linear_reference, mutates=(), fake=_fake, cuda=_linear_cuda)


def gated_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [2 * I, in] and bias [2 * I] with gates first -> silu(gate) * up [..., I]."""
    return silu_mul_reference(F.linear(x, weight, bias))


def _gated_linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tiles = choose_gated_tiles(rows_of(x), weight.shape[0])
    if tiles is not None and bias is None and halves(x, weight):
        return linear_triton(x, weight, None, tiles, gated=True)
    return silu_mul_triton(F.linear(x, weight, bias))


def _gated_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


gated_linear = register_op(
    "gated_linear", gated_linear_reference, mutates=(), fake=_gated_fake, cuda=_gated_linear_cuda
)
