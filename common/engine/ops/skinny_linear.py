"""The product of few rows with a weight matrix: decode at small batches, where only the bytes of the weight count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel_with_varying, tl

MAX_ROWS = 16  # one tile of the matrix units


def skinny_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed: [M, N]."""
    return F.linear(x, weight)


@kernel_with_varying("rows")
def _skinny_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, K]
    weight_ptr,  # [N, K]
    out_ptr,  # [rows, N]
    rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program streams BLOCK_N rows of the weight once, all of K: no partial sums to combine."""
    row, column = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * K
    out = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            weight = tl.load(weight_row + k[None, :])
        else:
            inside = (column < N)[:, None] & (k < K)[None, :]
            weight = tl.load(weight_row + k[None, :], mask=inside, other=0.0)
        read = (row < rows)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=read, other=0.0)
        out = tl.dot(x, tl.trans(weight), out, input_precision="ieee")
    written = (row < rows)[:, None] & (column < N)[None, :]
    tl.store(out_ptr + row[:, None] * N + column[None, :], out.to(out_ptr.dtype.element_ty), mask=written)


def skinny_linear_triton(
    x: Tensor, weight: Tensor, block: tuple[int, int] | None = None, num_stages: int = 4
) -> Tensor:
    rows, size = x.shape
    assert rows <= MAX_ROWS, f"{rows} rows are not few"
    assert weight.shape[1] == size, f"rows of {size} times {tuple(weight.shape)}"
    assert weight.is_contiguous(), "the weight must be contiguous"
    assert x.stride(1) == 1, "the elements of a row must be adjacent"
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    columns = weight.shape[0]
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows:
        block_n, block_k = block or ((32, 256) if columns <= 8192 else (64, 128))
        _skinny_linear_kernel[(cdiv(columns, block_n),)](
            x,
            weight,
            out,
            rows,
            x.stride(0),
            N=columns,
            K=size,
            ROWS=MAX_ROWS,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=num_stages,
        )
    return out


def _skinny_linear_cuda(x: Tensor, weight: Tensor) -> Tensor:
    few = x.shape[0] <= MAX_ROWS and x.dtype in (torch.float16, torch.bfloat16)
    return skinny_linear_triton(x, weight) if few else F.linear(x, weight)


def _fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


skinny_linear = register_op(
    "skinny_linear", skinny_linear_reference, mutates=(), fake=_fake, cuda=_skinny_linear_cuda
)
