"""The products of experts with FP8 weights for any number of tokens.

Pairs are grouped by expert, as in `grouped_products`: a tile is some adjacent pairs of one expert, and inner values are
in the order of the groups. Up to 16 tokens need no groups, as in `expert_products`: there is a program for every pair,
of which only that of an expert's first pair works.

The sums are those of `fp8_product`, or for up to 16 tokens and scales per channel those of `fp8_gated`: a program has
one accumulator over several steps, for gates and then for up projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.expert_products import pairs_of_expert
from common.engine.ops.fp8_codes import FP8, GROUP, decode, has_fp8
from common.engine.ops.fp8_product import EXACT_EVERY, add_scaled
from common.engine.ops.fp8_rows import quantize_rows_triton, quantize_with_triton
from common.engine.ops.fp8_tiles import (
    COLUMNS,
    DEEP,
    GATED_STAGES,
    MAX_ROWS,
    MIN_ROWS,
    SHARING,
    SUMMED,
    Fp8Tiles,
)
from common.engine.ops.group_pairs import FIELDS, PairGroups, group_pairs_triton
from common.engine.ops.shared_memory import room_of
from common.engine.ops.triton_kernel import (
    await_previous,
    cdiv,
    chained,
    kernel,
    kernel_with_varying,
    next_power_of_2,
    tl,
)


@kernel
def _sum_steps(  # type: ignore[no-untyped-def]
    lines,  # [ROWS, BLOCK_K] pointers to the first step of x
    weights,  # [COLUMNS, BLOCK_K] pointers to the first step of the weight
    real,
    wanted,
    up_offset,  # from gates to up projections
    DEPTH: tl.constexpr,  # a multiple of BLOCK_K * TOGETHER
    GATED: tl.constexpr,
    DECODED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Return the sums of gates and of up projections, or if not GATED the sums twice."""
    steps: tl.constexpr = DEPTH // BLOCK_K
    halves: tl.constexpr = 2 if GATED else 1
    gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    total = tl.zeros((COLUMNS, ROWS), tl.float32)  # that of the gates in the first half of the steps
    some = tl.zeros((COLUMNS, ROWS), tl.float32)  # the sum of the last steps
    for step in range(halves * steps):
        k, offset = step * BLOCK_K, 0
        if GATED:  # noqa: SIM102 - known to the compiler
            if step >= steps:
                k, offset = (step - steps) * BLOCK_K, up_offset
        few = tl.load(lines + k, mask=real[:, None], other=0.0)
        codes = tl.load(weights + (offset + k), mask=wanted[:, None], other=0.0)
        if DECODED:
            few, codes = decode(few), decode(codes)
        some = tl.dot(codes, tl.trans(few), some)
        if step % TOGETHER == TOGETHER - 1:
            total += some
            some = tl.zeros((COLUMNS, ROWS), tl.float32)
            if GATED:  # noqa: SIM102 - known to the compiler
                if step == steps - 1:
                    gate = total
                    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    if not GATED:
        gate = total
    return gate, total


@kernel_with_varying("tokens", "scale_stride", "group_stride")
def _fp8_grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [tokens, DEPTH] codes, or if not GATED [pairs, DEPTH] by place, if FEW by pair
    row_scales_ptr,  # [rows of x], or if BLOCKS [rows of x, groups]
    weight_ptr,  # [experts, size, DEPTH] codes, or if GATED [experts, 2 * size, DEPTH]
    scales_ptr,  # [experts, halves * size], or if BLOCKS [experts, halves, blocks, groups]
    pairs_ptr,  # [pairs], or if FEW their experts [pairs] int32
    tiles_ptr,  # [tiles, FIELDS]; not read if FEW
    shares_ptr,  # [pairs] float32; read if not GATED
    out_ptr,  # [pairs, size]: inner values by place, if FEW by pair, the experts' outputs by pair
    tokens,
    scale_stride,  # from a row's scale to the next row's
    group_stride,  # from a row's scale to that of the next group
    size,  # output columns
    DEPTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    DECODED: tl.constexpr,  # codes are bytes, which are multiplied as float16
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,  # there are at most ROWS tokens: a tile is all pairs of the expert of a pair
    ONE: tl.constexpr,  # there is one token
    BLOCK_C: tl.constexpr,  # at least CHOSEN
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVERY: tl.constexpr,
    TOGETHER: tl.constexpr,  # steps that one accumulator adds up; 1 if BLOCKS
    CHAINED: tl.constexpr,
):
    """Each program computes COLUMNS columns of a tile, if FEW only that of the first pair of an expert."""
    await_previous(CHAINED)
    first, asked = tl.program_id(0) * COLUMNS, tl.program_id(1)
    if FEW:
        expert, begin, count = tl.load(pairs_ptr + asked), asked, 1
        works = expert >= 0
        if not ONE:
            listed, same, leader = pairs_of_expert(pairs_ptr, expert, tokens, CHOSEN, ROWS, BLOCK_C)
            works = works & (leader == asked)
    else:
        tile = tiles_ptr + asked * FIELDS
        expert, begin, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        works = count > 0
    expert = expert.to(tl.int64)
    if works:
        place = begin + tl.arange(0, ROWS)
        column, step = first + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K)
        real, wanted = place < begin + count, column < size
        pair = place
        if not FEW:
            pair = tl.load(pairs_ptr + place, mask=real, other=0)
        elif not ONE:
            real = tl.max(same.to(tl.int32), axis=1) > 0
            pair = tl.sum(tl.where(same, listed, 0), axis=1)
            place = pair
        source, halves = place, 1
        if GATED:
            source, halves = pair // CHOSEN, 2
        lines = x_ptr + source.to(tl.int64)[:, None] * DEPTH + step[None, :]
        row_line = row_scales_ptr + source.to(tl.int64) * scale_stride
        weights = weight_ptr + (expert * halves * size + column)[:, None] * DEPTH + step[None, :]
        groups: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
        line = scales_ptr + expert * halves * size + column
        next_half = size
        if BLOCKS:
            blocks = (size + BLOCK_K - 1) // BLOCK_K
            line = scales_ptr + (expert * halves * blocks + column // BLOCK_K) * groups
            next_half = blocks * groups
        if TOGETHER > 1:
            out, up = _sum_steps(
                lines, weights, real, wanted, size * DEPTH,
                DEPTH, GATED, DECODED, ROWS, COLUMNS, BLOCK_K, TOGETHER,
            )  # fmt: skip
        else:
            out = tl.zeros((COLUMNS, ROWS), tl.float32)
            up = tl.zeros((COLUMNS, ROWS), tl.float32)
            for k in range(0, DEPTH, BLOCK_K):
                row_scale = 1.0
                scale = 1.0
                up_scale = 1.0
                if BLOCKS:
                    group = k // BLOCK_K
                    row_scale = tl.load(row_line + group * group_stride, mask=real, other=0.0)
                    scale = tl.load(line + group, mask=wanted, other=0.0)
                deep = (k + step < DEPTH)[None, :]
                few = tl.load(lines + k, mask=real[:, None] & deep, other=0.0)
                codes = tl.load(weights + k, mask=wanted[:, None] & deep, other=0.0)
                if DECODED:
                    few, codes = decode(few), decode(codes)
                few = tl.trans(few)
                out = add_scaled(out, codes, few, scale, row_scale, BLOCKS, EVERY)
                if GATED:
                    if BLOCKS:
                        up_scale = tl.load(line + next_half + group, mask=wanted, other=0.0)
                    codes = tl.load(weights + size * DEPTH + k, mask=wanted[:, None] & deep, other=0.0)
                    if DECODED:
                        codes = decode(codes)
                    up = add_scaled(up, codes, few, up_scale, row_scale, BLOCKS, EVERY)
        if not BLOCKS:
            row_scale = tl.load(row_line, mask=real, other=0.0)
            out *= tl.load(line, mask=wanted, other=0.0)[:, None] * row_scale[None, :]
            if GATED:
                up *= tl.load(line + next_half, mask=wanted, other=0.0)[:, None] * row_scale[None, :]
        dtype = out_ptr.dtype.element_ty
        target = place
        if GATED:
            # Rounded where two separate kernels would round.
            gate = out.to(dtype).to(tl.float32)
            out = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
        else:
            share = tl.load(shares_ptr + pair, mask=real, other=0.0)
            out = out.to(dtype).to(tl.float32) * share[None, :]
            target = pair
        to = out_ptr + target.to(tl.int64)[None, :] * size + column[:, None]
        tl.store(to, out.to(dtype), mask=real[None, :] & wanted[:, None])


def fp8_grouped_triton(
    codes: Tensor,
    row_scales: Tensor,
    stack: Tensor,
    scales: Tensor,
    shares: Tensor,
    groups: PairGroups,
    gated: bool,
    tiles: Fp8Tiles,
    dtype: torch.dtype,
) -> Tensor:
    """Return [P, I] by place for codes [T, H] if `gated`, else [P, H] by pair for codes [P, I] by place.

    With up to MIN_ROWS tokens, the place of a pair is its number.

    Args:
        row_scales: [rows of codes, 1], or with scales per block [rows of codes, groups], of any strides.
        stack: codes [E, 2 * I, H] or [E, H, I].
        scales: as `fp8_expert_parts` takes them.
        shares: [T, K] float32.
        groups: the pairs in tiles of `tiles.rows`; for up to MIN_ROWS tokens a tile per pair, with the experts as
            pairs.
    """
    count, width, depth = stack.shape
    blocks, size = scales.ndim > 2, width // 2 if gated else width
    assert codes.dtype == stack.dtype == FP8, f"{codes.dtype} times {stack.dtype}"
    assert codes.is_contiguous(), "the rows must be contiguous"
    assert stack.is_contiguous(), "the stack must be contiguous"
    assert scales.is_contiguous(), "the scales of the weights must be contiguous"
    expected = cdiv(size, GROUP) * cdiv(depth, GROUP) * (2 if gated else 1) if blocks else width
    assert scales.numel() == count * expected, f"weight scales {tuple(scales.shape)}"
    assert shares.dtype == torch.float32 and shares.is_contiguous(), "shares are contiguous float32"  # noqa: PT018
    assert not blocks or tiles.depth == GROUP, "a step has the depth of a block"
    whole = not blocks and depth % (tiles.depth * tiles.together) == 0
    assert tiles.together == 1 or whole, f"{tiles.together} steps together, of a depth of {depth}"
    out = codes.new_empty((shares.numel(), size), dtype=dtype)
    if out.numel():
        decoded = not has_fp8(codes.device)
        if decoded:
            codes, stack = codes.view(torch.uint8), stack.view(torch.uint8)
        _fp8_grouped_kernel[(cdiv(size, tiles.columns), len(groups.tiles))](
            codes,
            row_scales,
            stack,
            scales,
            *groups,
            shares,
            out,
            len(shares),
            row_scales.stride(0),
            row_scales.stride(1),
            size,
            DEPTH=depth,
            CHOSEN=shares.shape[1],
            GATED=gated,
            DECODED=decoded,
            BLOCKS=blocks,
            ROWS=tiles.rows,
            FEW=len(shares) <= MIN_ROWS,
            ONE=len(shares) == 1,
            BLOCK_C=next_power_of_2(shares.shape[1]),
            FIELDS=FIELDS,
            COLUMNS=tiles.columns,
            BLOCK_K=tiles.depth,
            EVERY=min(EXACT_EVERY, tiles.depth),
            TOGETHER=tiles.together,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
            **chained(codes.device),
        )
    return out


def choose_grouped_tiles(pairs: int, experts: int, gated: bool, blocks: bool, shared: int) -> Fp8Tiles:
    """Choose tiles from the pairs that an expert has on average; the rows do not depend on `gated`.

    With scales per block, the partial sums of a larger tile need more registers than there are.
    """
    rows = min(max(next_power_of_2(cdiv(pairs, experts)), MIN_ROWS), MAX_ROWS)
    large = rows == MAX_ROWS and not blocks
    tiles = Fp8Tiles(128 if large else 64, GROUP, 8 if large else 4, 4, rows)
    return tiles.fitting(shared if large else shared // 2, 2 if gated else 1)


def sum_more_steps(tiles: Fp8Tiles, depth: int, gated: bool, shared: int) -> Fp8Tiles:
    """Return tiles with one accumulator over at most SUMMED values, for scales per channel and MIN_ROWS rows.

    They are those given if the depth does not consist of whole sums of several steps.
    """
    deep = gated and depth % SUMMED == 0
    step, stages = (DEEP, GATED_STAGES) if deep else (GROUP, SHARING)
    together = next(each for each in range(SUMMED // step, 0, -1) if depth % (each * step) == 0 or each == 1)
    if together == 1:
        return tiles
    return Fp8Tiles(COLUMNS, step, 4, stages, MIN_ROWS, together=together).fitting(shared // 2)


def fp8_expert_parts_triton(
    x: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    input_scales: Tensor | None,
    experts: Tensor,
    shares: Tensor,
) -> Tensor:
    """Compute `fp8_expert_parts` on a GPU; the output of a pair without an expert is undefined."""
    (tokens, chosen), count = experts.shape, len(gate_up)
    shared, blocks = room_of(x.device).shared_bytes, down_scales.ndim > 2

    def quantized(rows: Tensor, index: int) -> tuple[Tensor, Tensor]:
        if input_scales is None:
            return quantize_rows_triton(rows.contiguous(), blocks)
        return quantize_with_triton(rows.contiguous(), input_scales[index])

    up_tiles, down_tiles = (
        choose_grouped_tiles(experts.numel(), count, gated, blocks, shared) for gated in (True, False)
    )
    if 1 < tokens <= MIN_ROWS and not blocks:
        up_tiles = sum_more_steps(up_tiles, x.shape[1], True, shared)
        down_tiles = sum_more_steps(down_tiles, down.shape[2], False, shared)
    groups = PairGroups(experts.view(-1), experts.view(-1, 1))
    if tokens > MIN_ROWS:
        groups = group_pairs_triton(experts.view(-1), count, up_tiles.rows)
    rest = shares, groups
    inner = fp8_grouped_triton(*quantized(x, 0), gate_up, gate_up_scales, *rest, True, up_tiles, x.dtype)
    out = fp8_grouped_triton(*quantized(inner, 1), down, down_scales, *rest, False, down_tiles, x.dtype)
    return out.view(tokens, chosen, x.shape[1])
