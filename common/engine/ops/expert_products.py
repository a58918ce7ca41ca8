"""The products of the chosen experts of each token: share * down(silu(gate(x)) * up(x)).

A pair is a token with one of its experts; pair t * K + k is the k-th expert of token t. Each of the two products is
one kernel over tiles of the weight's rows. As in `linear`, the rows of the weight are the rows of the matrix units and
the tokens are the columns, and a token's result does not depend on the other tokens of its tile.

Few tokens: there is a program for every pair and every tile, of which only that of an expert's first pair works. It
reads its tile of the weight once, for all tokens of the expert; the others end at once, so that no sorting is needed
and the grid does not depend on the routing. Up to 16 tokens its gates and up projections are one tile
(`joined_tile`). A single token has a form without matrix units (`expert_vectors`).

Many tokens: pairs are grouped by expert, and the programs that an expert gets follow from the number of its pairs
(`grouped_products`). No form waits for the device, and a pair without an expert costs nothing.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.expert_tiles import FEW, FEW_TOKENS, ExpertTiles, choose_few, choose_many
from common.engine.ops.expert_vectors import DOWN_VECTORS, UP_VECTORS, pair_vectors_triton
from common.engine.ops.expert_weights import joined_tile, prepare, separate, weight_tile
from common.engine.ops.group_pairs import group_pairs_triton
from common.engine.ops.grouped_products import grouped_product_triton
from common.engine.ops.linear import halves
from common.engine.ops.registration import register_op
from common.engine.ops.shared_memory import room_of
from common.engine.ops.silu_mul import silu_mul_reference
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    described,
    kernel,
    kernel_with_varying,
    multiprocessors,
    next_power_of_2,
    tl,
)
from common.engine.ops.vector_products import DEPTH


def expert_parts_reference(
    x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor
) -> Tensor:
    """Return [T, K, H], in the dtype of x: the output of each chosen expert times its share.

    Args:
        x: [T, H].
        gate_up: [E, 2 * I, H], gates first.
        down: [E, H, I].
        experts: [T, K] int32; a token has no expert twice. Negative: none, the output is zero.
        shares: [T, K] float32.
    """
    tokens, chosen = experts.shape
    out = x.new_zeros((tokens * chosen, x.shape[1]))
    # Pairs by expert; those without one come first.
    counts = (experts.flatten() + 1).bincount(minlength=len(gate_up) + 1).tolist()
    pairs = experts.flatten().argsort(stable=True)
    end = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            of_expert = pairs[end : end + count]
            inner = silu_mul_reference(F.linear(x[of_expert // chosen], gate_up[expert]))
            share = shares.view(-1, 1)[of_expert]
            out[of_expert] = (F.linear(inner, down[expert]) * share).to(x.dtype)
            end += count
    return out.view(tokens, chosen, x.shape[1])


@kernel
def _multiply_pairs(  # type: ignore[no-untyped-def]
    x_ptr,  # [tokens, DEPTH], or if not GATED [pairs, DEPTH]
    weight,  # [experts * size, DEPTH], or if GATED [experts * 2 * size, DEPTH]
    shares_ptr,  # [pairs] float32; read if not GATED
    out_ptr,  # [pairs, size]
    pair,  # [ROWS]
    real,  # [ROWS] bool
    expert,
    first,
    size,
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    JOINED: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute COLUMNS output columns of the given pairs of one expert."""
    source = pair
    begin = expert * size
    if GATED:
        source = pair // CHOSEN
        begin = expert * 2 * size
    place = x_ptr + source.to(tl.int64)[:, None] * DEPTH
    lines: tl.constexpr = 2 * COLUMNS if JOINED else COLUMNS
    out = tl.zeros((lines, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        read = real[:, None]
        if CUT:
            read = read & (column < DEPTH)[None, :]
        few = tl.trans(tl.load(place + column[None, :], mask=read, other=0.0))
        if JOINED:
            tile = joined_tile(weight, begin, first, size, k, DEPTH, CUT, COLUMNS, BLOCK_K)
        else:
            tile = weight_tile(weight, begin + first, begin + size, k, DEPTH, CUT, BULK, COLUMNS, BLOCK_K)
        out = tl.dot(tile, few, out, input_precision="ieee")
        if GATED and not JOINED:
            tile = weight_tile(
                weight, begin + size + first, begin + 2 * size, k, DEPTH, CUT, BULK, COLUMNS, BLOCK_K
            )
            up = tl.dot(tile, few, up, input_precision="ieee")
    dtype = out_ptr.dtype.element_ty
    if JOINED:
        out, up = separate(out, COLUMNS, ROWS)
    if GATED:
        # Rounded where two separate kernels would round.
        gate = out.to(dtype).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    else:
        share = tl.load(shares_ptr + pair, mask=real, other=0.0)
        out = out.to(dtype).to(tl.float32) * share[None, :]
    column = first + tl.arange(0, COLUMNS)
    place = out_ptr + pair.to(tl.int64)[None, :] * size + column[:, None]
    tl.store(place, out.to(dtype), mask=real[None, :] & (column < size)[:, None])


@kernel
def pairs_of_expert(  # type: ignore[no-untyped-def]
    experts_ptr,  # [tokens, CHOSEN] int32
    expert,
    tokens,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return the numbers of all pairs [TOKENS, BLOCK_C], which of them have the expert, and the first that has it."""
    token, rank = tl.arange(0, TOKENS), tl.arange(0, BLOCK_C)
    listed = token[:, None] * CHOSEN + rank[None, :]
    exists = (token < tokens)[:, None] & (rank < CHOSEN)[None, :]
    same = exists & (tl.load(experts_ptr + listed, mask=exists, other=-1) == expert)
    return listed, same, tl.min(tl.min(tl.where(same, listed, TOKENS * CHOSEN), axis=1), axis=0)


@kernel_with_varying("tokens")
def _few_pairs_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight,
    experts_ptr,  # [tokens, CHOSEN] int32
    shares_ptr,
    out_ptr,
    tokens,
    size,  # output columns
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    JOINED: tl.constexpr,
    CUT: tl.constexpr,
    BULK: tl.constexpr,
    FEW: tl.constexpr,
    ONE: tl.constexpr,  # there is one token
    TOKENS: tl.constexpr,  # at least `tokens`
    BLOCK_C: tl.constexpr,  # at least CHOSEN
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The program of an expert's first pair computes COLUMNS columns for all tokens of the expert."""
    await_previous(CHAINED)
    first, asked = tl.program_id(0) * COLUMNS, tl.program_id(1)
    expert = tl.load(experts_ptr + asked)
    leader = asked
    if not ONE:
        listed, same, leader = pairs_of_expert(experts_ptr, expert, tokens, CHOSEN, TOKENS, BLOCK_C)
    if (expert >= 0) & (leader == asked):
        if ONE:
            has = (tl.arange(0, TOKENS) == 0).to(tl.int32)
            pair = has * asked
        else:
            has = tl.max(same.to(tl.int32), axis=1)
            pair = tl.sum(tl.where(same, listed, 0), axis=1)
        count = tl.sum(has, axis=0)
        if TOKENS > FEW and count <= FEW:
            # Gather the expert's tokens into the smallest tile.
            row = tl.arange(0, FEW)
            here = ((tl.cumsum(has, axis=0) - 1)[None, :] == row[:, None]) & (has > 0)[None, :]
            packed = tl.sum(tl.where(here, pair[None, :], 0), axis=1)
            _multiply_pairs(
                x_ptr, weight, shares_ptr, out_ptr, packed, row < count, expert, first, size,
                DEPTH, CHOSEN, GATED, JOINED, CUT, BULK, FEW, COLUMNS, BLOCK_K,
            )  # fmt: skip
        else:
            _multiply_pairs(
                x_ptr, weight, shares_ptr, out_ptr, pair, has > 0, expert, first, size,
                DEPTH, CHOSEN, GATED, JOINED, CUT, BULK, TOKENS, COLUMNS, BLOCK_K,
            )  # fmt: skip


def few_pairs_triton(
    x: Tensor, stack: Tensor, experts: Tensor, shares: Tensor, gated: bool, tiles: ExpertTiles
) -> Tensor:
    """Multiply as many tokens as a tile has rows: [P, I] of x [T, H] if `gated`, else [P, H] of x [P, I]."""
    tokens, chosen = experts.shape
    assert tokens <= tiles.rows, f"{tokens} tokens, a tile has {tiles.rows}"
    assert gated or not tiles.joined, "only gates and up projections can be one tile"
    size, rows, out, bulk = prepare(x, stack, experts, shares, gated, tiles)
    if tokens:
        _few_pairs_kernel[(cdiv(size, tiles.columns), tokens * chosen)](
            x,
            described(rows, tiles.columns, tiles.depth) if bulk else rows,
            experts,
            shares,
            out,
            tokens,
            size,
            DEPTH=rows.shape[1],
            CHOSEN=chosen,
            GATED=gated,
            JOINED=tiles.joined,
            CUT=rows.shape[1] % tiles.depth != 0,
            BULK=bulk,
            FEW=FEW,
            ONE=tokens == 1,
            TOKENS=tiles.rows,
            BLOCK_C=next_power_of_2(chosen),
            COLUMNS=tiles.columns,
            BLOCK_K=tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **chained(x.device),
        )
    return out


def expert_parts_triton(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    (tokens, chosen), count = experts.shape, len(gate_up)
    gpu = multiprocessors(x.device), room_of(x.device).shared_bytes
    itemsize = x.element_size()
    x = x.contiguous()
    if tokens == 1 and max(gate_up.shape[2], down.shape[2]) <= DEPTH and halves(x, gate_up):
        inner = pair_vectors_triton(x, gate_up, experts, shares, True, UP_VECTORS)
        out = pair_vectors_triton(inner, down, experts, shares, False, DOWN_VECTORS)
    elif tokens <= FEW_TOKENS:
        up_tiles = choose_few(
            tokens, min(tokens * chosen, count), gate_up.shape[1] // 2, itemsize, True, *gpu
        )
        down_tiles = choose_few(tokens, min(tokens * chosen, count), down.shape[1], itemsize, False, *gpu)
        inner = few_pairs_triton(x, gate_up, experts, shares, True, up_tiles)
        out = few_pairs_triton(inner, down, experts, shares, False, down_tiles)
    else:
        up_tiles, down_tiles = (
            choose_many(experts.numel(), count, itemsize, gated, gpu[1]) for gated in (True, False)
        )
        groups = group_pairs_triton(experts.view(-1), count, up_tiles.rows, up_tiles.extra)
        inner = grouped_product_triton(x, gate_up, experts, shares, groups, True, up_tiles)
        out = grouped_product_triton(inner, down, experts, shares, groups, False, down_tiles)
    return out.view(tokens, chosen, x.shape[1])


def _fake(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    return x.new_empty((*experts.shape, x.shape[1]))


expert_parts = register_op(
    "expert_parts",
    expert_parts_reference,
    mutates=(),
    fake=_fake,
    cuda=expert_parts_triton,
    inlined=False,
)
