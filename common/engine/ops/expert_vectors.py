"""The products of the experts of a few tokens, without the matrix units: see `expert_products` for the computation.

A program handles one pair of a token and an expert, and keeps its rows of the weight in registers. Tokens that share an
expert read its weights from the L2 cache, so nobody has to find out which tokens share one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.silu_mul import activate
from common.engine.ops.triton_kernel import (
    await_previous,
    await_results,
    cdiv,
    chained,
    kernel,
    next_power_of_2,
    tl,
)
from common.engine.ops.vector_products import VectorTiles, load_rows, load_vector

# As measured on an H200 with the shapes of Qwen3-30B-A3B and Qwen3.5-35B-A3B (tests/bench/NOTES.md).
UP_VECTORS, DOWN_VECTORS = VectorTiles(2, 2), VectorTiles(4, 2)


@kernel
def _pair_vectors_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [tokens, DEPTH], or if not GATED [pairs, DEPTH]
    weight_ptr,  # [experts * size, DEPTH], or if GATED [experts * 2 * size, DEPTH]
    experts_ptr,  # [tokens, CHOSEN] int32
    shares_ptr,  # [pairs] float32; read if not GATED
    out_ptr,  # [pairs, size]
    size,  # output columns
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least DEPTH
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Each program computes COLUMNS columns of one pair."""
    await_previous(CHAINED)
    pair = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    expert = tl.load(experts_ptr + pair)
    if expert >= 0:
        real = column < size
        dtype = out_ptr.dtype.element_ty
        if GATED:
            gates = load_rows(weight_ptr, expert * 2 * size + column, real, DEPTH, BLOCK_K)
            ups = load_rows(weight_ptr, (expert * 2 + 1) * size + column, real, DEPTH, BLOCK_K)
            await_results(CHAINED)  # returns at once; all loads above are issued before it
            x = load_vector(x_ptr + pair // CHOSEN * DEPTH, DEPTH, BLOCK_K)
            # Rounded where two separate kernels would round.
            gate = tl.sum(gates.to(tl.float32) * x, axis=1).to(dtype).to(tl.float32)
            up = tl.sum(ups.to(tl.float32) * x, axis=1).to(dtype).to(tl.float32)
            out = activate(gate, False) * up
        else:
            share = tl.load(shares_ptr + pair)
            tile = load_rows(weight_ptr, expert * size + column, real, DEPTH, BLOCK_K)
            await_results(CHAINED)  # returns at once; all loads above are issued before it
            x = load_vector(x_ptr + pair * DEPTH, DEPTH, BLOCK_K)
            out = tl.sum(tile.to(tl.float32) * x, axis=1).to(dtype).to(tl.float32) * share
        tl.store(out_ptr + pair * size + column, out.to(dtype), mask=real)


def check_layout(x: Tensor, stack: Tensor, experts: Tensor, shares: Tensor) -> None:
    """Assert what the kernels of pairs assume of their arguments."""
    depth = stack.shape[2]
    assert stack.is_contiguous(), "the stack must be contiguous"
    assert x.dtype == stack.dtype, f"{x.dtype} times {stack.dtype}"
    assert x.is_contiguous() and x.shape[1] == depth, f"x is {tuple(x.shape)}, the experts take {depth}"  # noqa: PT018
    assert experts.dtype == torch.int32 and experts.is_contiguous(), "experts are contiguous int32"  # noqa: PT018
    assert shares.dtype == torch.float32 and shares.is_contiguous(), "shares are contiguous float32"  # noqa: PT018
    assert shares.shape == experts.shape, "one share per expert"


def pair_vectors_triton(
    x: Tensor, stack: Tensor, experts: Tensor, shares: Tensor, gated: bool, tiles: VectorTiles
) -> Tensor:
    """Return [P, I] for x [T, H] if `gated`, else [P, H] for x [P, I]; a pair without an expert is undefined."""
    check_layout(x, stack, experts, shares)
    _, width, depth = stack.shape
    size = width // 2 if gated else width
    out = x.new_empty((experts.numel(), size))
    if out.numel():
        _pair_vectors_kernel[(cdiv(size, tiles.columns), experts.numel())](
            x,
            stack,
            experts,
            shares,
            out,
            size,
            DEPTH=depth,
            BLOCK_K=next_power_of_2(depth),
            CHOSEN=experts.shape[1],
            GATED=gated,
            COLUMNS=tiles.columns,
            num_warps=tiles.warps,
            **chained(x.device),
        )
    return out
