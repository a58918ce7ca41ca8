"""y = x W^T + b, and act(x G^T) * (x U^T), for few rows of x: a decode step reads the weights once.

Such a product is memory-bound. The weight's rows are the rows of the matrix units (64 at once) and the few rows of x
are the columns, so both are multiplied from shared memory without a transposition, with the bulk copies of a Hopper
GPU where possible. The kernel is launched while the previous one still runs (`chained`), and includes the activation,
which would be a launch of its own. A row's result does not depend on the other rows of its tile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import room_of
from common.engine.ops.silu_mul import (
    GATED_KERNELS,
    GATED_REFERENCES,
    activate,
)
from common.engine.ops.tiles import FEW, Tiles, choose_gated_tiles, choose_tiles
from common.engine.ops.triton_kernel import (
    await_results,
    cdiv,
    chained,
    copies_in_bulk,
    described,
    kernel,
    kernel_with_varying,
    launch_next,
    multiprocessors,
    tl,
)
from common.engine.ops.vector_products import choose_vectors, vector_linear_triton


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., out] for x [..., in], weight [out, in], bias [out]."""
    return F.linear(x, weight, bias)


@kernel
def load_tile(  # type: ignore[no-untyped-def]
    matrix,  # a descriptor made by `described` if BULK, else a pointer
    first,
    k,
    rows,  # rows of the matrix
    stride,
    DEPTH: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return [ROWS, BLOCK_K] from row `first` and column k on; zero past the end of the matrix."""
    if BULK:
        tile = matrix.load([first, k])
    else:
        row, column = first + tl.arange(0, ROWS), k + tl.arange(0, BLOCK_K)
        read = (row < rows)[:, None]
        if CUT:
            read = read & (column < DEPTH)[None, :]
        tile = tl.load(matrix + row.to(tl.int64)[:, None] * stride + column[None, :], mask=read, other=0.0)
    return tile


@kernel
def _store_rows(  # type: ignore[no-untyped-def]
    out, up, bias_ptr, out_ptr, top, rows, column, size, begin,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Complete the sums [columns, ROWS] of the rows from `top` on and store them."""
    dtype = out_ptr.dtype.element_ty
    row, real = top + tl.arange(0, ROWS), column < size
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=real, other=0.0).to(tl.float32)
        out += tl.where(begin == 0, bias, 0.0)[:, None]  # only the first part adds it
    if GATED:
        # Rounded where two separate kernels would round.
        gate = out.to(dtype).to(tl.float32)
        out = activate(gate, GELU) * up.to(dtype).to(tl.float32)
    line = tl.program_id(1) * rows + row
    place = out_ptr + line.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(place, out.to(dtype), mask=(row < rows)[None, :] & real[:, None])


@kernel_with_varying("rows")
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [rows, DEPTH]
    rest,  # x for tiles of REST rows; read if REST
    weight,  # [size, DEPTH], or if GATED [2 * size, DEPTH]: gates, then up projections
    bias_ptr,  # [size]; read if BIAS
    out_ptr,  # [rows, size], or float32 [parts, rows, size], whose parts have to be added up
    rows,
    size,  # output columns
    x_stride,
    DEPTH: tl.constexpr,
    PART: tl.constexpr,  # depth of one part, a multiple of BLOCK_K
    CUT: tl.constexpr,  # the last part extends past the depth
    BULK: tl.constexpr,  # x and weight are descriptors
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of the first tile; at least `rows` without REST
    REST: tl.constexpr,  # rows of a second tile, which ends with the last row; 0: there is none
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,  # the activation of gates; else silu
    CHAINED: tl.constexpr,
):
    """Each program computes BLOCK_N columns of all rows over one part of the depth."""
    await_results(CHAINED)
    # Only now: the next kernel may read what is older than this one before it waits.
    launch_next(CHAINED)
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * PART
    out = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    if REST:
        more = tl.zeros((BLOCK_N, REST), tl.float32)
        more_up = tl.zeros((BLOCK_N, REST), tl.float32)
    weight_rows = size
    if GATED:
        weight_rows = 2 * size
    for start in range(begin, begin + PART, BLOCK_K):
        few = tl.trans(load_tile(x, 0, start, rows, x_stride, DEPTH, CUT, BULK, ROWS, BLOCK_K))
        tile = load_tile(weight, first, start, weight_rows, DEPTH, DEPTH, CUT, BULK, BLOCK_N, BLOCK_K)
        out = tl.dot(tile, few, out, input_precision="ieee")
        if REST:
            last = load_tile(rest, rows - REST, start, rows, x_stride, DEPTH, CUT, BULK, REST, BLOCK_K)
            more = tl.dot(tile, tl.trans(last), more, input_precision="ieee")
        if GATED:
            tile = load_tile(
                weight, size + first, start, weight_rows, DEPTH, DEPTH, CUT, BULK, BLOCK_N, BLOCK_K
            )
            up = tl.dot(tile, few, up, input_precision="ieee")
            if REST:
                more_up = tl.dot(tile, tl.trans(last), more_up, input_precision="ieee")
    column = first + tl.arange(0, BLOCK_N)
    _store_rows(out, up, bias_ptr, out_ptr, 0, rows, column, size, begin, BIAS, GATED, GELU, ROWS)
    if REST:
        # Rows of both tiles have the same sums.
        top = rows - REST
        _store_rows(more, more_up, bias_ptr, out_ptr, top, rows, column, size, begin, BIAS, GATED, GELU, REST)


def linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles, activation: str | None = None
) -> Tensor:
    """Compute at most `tiles.most_rows` rows in one part; for several parts see `linear_parts`.

    Args:
        activation: of the gates of a gated product, see `gated_linear`; None for a plain product.
    """
    assert tiles.parts == 1, "the reader of a product adds up its parts"
    size = weight.shape[0] // 2 if activation else weight.shape[0]
    out = x.new_empty((*x.shape[:-1], size))
    _launch(x, weight, bias, out, tiles, activation)
    return out


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Divide the depth among programs and return [parts, rows, size] float32; see `linear_add_rms_norm`."""
    out = x.new_empty((tiles.parts, rows_of(x), weight.shape[0]), dtype=torch.float32)
    _launch(x, weight, bias, out, tiles, activation=None)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    activation: str | None,
) -> None:
    size, depth = weight.shape
    rows = x.reshape(-1, depth)
    assert rows.shape[0] <= tiles.most_rows, f"{rows.shape[0]} rows, tiles have {tiles.most_rows}"
    assert tiles.rest <= rows.shape[0], f"{rows.shape[0]} rows, the second tile has {tiles.rest}"
    assert rows.dtype == weight.dtype, f"{rows.dtype} times {weight.dtype}"
    assert rows.stride(1) == 1, "the elements of a row must be adjacent"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert bias is None or (bias.shape == (size,) and bias.is_contiguous()), "one bias per output"
    if activation:
        assert bias is None and size % 2 == 0, "gate and up have one width and no bias"  # noqa: PT018
        size //= 2
    if out.numel() == 0:
        return
    part = cdiv(cdiv(depth, tiles.depth), tiles.parts) * tiles.depth
    # 16 rows are as fast without bulk copies, one row is faster.
    bulk = tiles.rows > FEW and copies_in_bulk(rows, weight)
    _linear_kernel[(cdiv(size, tiles.columns), tiles.parts)](
        described(rows, tiles.rows, tiles.depth) if bulk else rows,
        described(rows, tiles.rest, tiles.depth) if bulk and tiles.rest else rows,
        described(weight, tiles.columns, tiles.depth) if bulk else weight,
        weight if bias is None else bias,
        out,
        rows.shape[0],
        size,
        rows.stride(0),
        DEPTH=depth,
        PART=part,
        CUT=part * tiles.parts != depth,
        BULK=bulk,
        BIAS=bias is not None,
        ROWS=tiles.rows,
        REST=tiles.rest,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.depth,
        GATED=activation is not None,
        GELU=activation == "gelu_tanh",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **chained(x.device),
    )


def halves(x: Tensor, weight: Tensor) -> bool:
    """Return whether tandem's kernel serves them: 16 bits, and a contiguous weight."""
    return x.dtype in (torch.float16, torch.bfloat16) and weight.is_contiguous()


def rows_of(x: Tensor) -> int:
    """Return the number of rows of x [..., in]."""
    return x.numel() // x.shape[-1]


def _linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    vectors = choose_vectors(rows_of(x), *weight.shape)
    if vectors is not None and halves(x, weight):
        return vector_linear_triton(x, weight, bias, vectors, leads=True)
    gpu = multiprocessors(x.device), room_of(x.device).shared_bytes
    tiles = choose_tiles(rows_of(x), weight.shape[0], *gpu)
    if tiles is not None and halves(x, weight):
        return linear_triton(x, weight, bias, tiles)
    return F.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


linear = register_op("linear", linear_reference, mutates=(), fake=_fake, cuda=_linear_cuda)


def gated_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "silu"
) -> Tensor:
    """Return activation(gate) * up [..., I] for x [..., in], weight [2 * I, in] and bias [2 * I], gates first."""
    return GATED_REFERENCES[activation](F.linear(x, weight, bias))


def _gated_linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "silu") -> Tensor:
    gpu = multiprocessors(x.device), room_of(x.device).shared_bytes
    tiles = choose_gated_tiles(rows_of(x), weight.shape[0], *gpu)
    if tiles is not None and bias is None and halves(x, weight):
        return linear_triton(x, weight, None, tiles, activation)
    return GATED_KERNELS[activation](F.linear(x, weight, bias))


def _gated_fake(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "silu") -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // 2))


gated_linear = register_op(
    "gated_linear", gated_linear_reference, mutates=(), fake=_gated_fake, cuda=_gated_linear_cuda
)
