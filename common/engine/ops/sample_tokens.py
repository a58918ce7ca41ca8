"""Samples one token per row of logits: exact argmax for greedy rows, the Gumbel-max draw for the others.

argmax(scaled + g) with independent Gumbel g is a draw from softmax(scaled). The random words come from `philox`,
keyed by seed, position and token, so the draws are the same on every device and in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.logit_checks import check_rows
from common.engine.ops.philox import token_words
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import cdiv, kernel, next_power_of_2, tl
from common.messages.generation import GREEDY_EPSILON

BLOCK = 4096  # vocabulary entries per program


def sample_tokens_reference(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    floor: Tensor | None,
    all_greedy: bool,
) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits / temperature), or take the likeliest token.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32; below GREEDY_EPSILON: argmax, the lowest index among equals.
        seed: [R] int64.
        position: [R] int64, sequence index of the token to be drawn.
        floor: [R] float32; a random row draws no token whose logit is below it. None: no filter.
        all_greedy: every temperature is below GREEDY_EPSILON.

    Returns (tokens [R] int64, invalid [R] bool: the row contains a NaN or has no finite maximum; its token is
    meaningless, but within the vocabulary).
    """
    likeliest, invalid = logits.argmax(-1), ~logits.amax(-1).isfinite()
    if all_greedy:
        return likeliest, invalid
    greedy = temperature < GREEDY_EPSILON
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    if floor is not None:
        scaled = scaled.masked_fill(logits < floor[:, None], -torch.inf)
    drawn = (scaled + gumbel(token_words(seed, position, logits.shape[-1]))).argmax(-1)
    return torch.where(greedy, likeliest, drawn), invalid


def gumbel(words: Tensor) -> Tensor:
    """Return Gumbel noise -log(-log(u)), float32 and finite, from random words below 2**32 (int64).

    With u = 1 - v the inner logarithm is log1p(-v), which is exact for small v, and these produce the winning values.
    """
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return torch.log1p(-v).neg_().log_().neg_()


@kernel
def gumbel_of_words(words):  # type: ignore[no-untyped-def]
    """`gumbel` of uint32 words. The fast logarithm has an absolute error, so small v use the series of log1p."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    inner = tl.where(v < 0.0625, series, -tl.log(tl.where(v < 0.0625, 0.5, 1.0 - v)))
    return -tl.log(inner)


@kernel
def draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, V]
    temperature_ptr,  # [R]
    seed_ptr,
    position_ptr,
    floor_ptr,  # [R]; read if FLOOR
    best_ptr,  # [R, blocks] float32, the largest perturbed logit of a block
    token_ptr,  # [R, blocks] int32, its token
    peak_ptr,  # [R, blocks] float32, the largest raw logit; +inf if one is NaN
    vocab,  # columns of logits
    first,  # token of the first of them
    logits_stride,
    greedy_below,
    RANDOM: tl.constexpr,
    FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block, blocks = tl.program_id(1), tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab
    logits = tl.load(logits_ptr + row * logits_stride + token, mask=live, other=float("-inf"))
    is_nan = logits != logits
    choice = tl.where(is_nan, float("-inf"), logits)
    peak = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("inf"), tl.max(choice, axis=0))
    temperature = tl.load(temperature_ptr + row)
    if RANDOM and (temperature >= greedy_below):
        if FLOOR:
            choice = tl.where(choice < tl.load(floor_ptr + row), float("-inf"), choice)
        choice = tl.div_rn(choice, tl.full((BLOCK,), 1.0, tl.float32) * temperature)
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        zero = token * 0
        token += first
        low = zero + (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        words, _, _, _ = tl.philox(seed, token, low, high, zero)
        choice = choice + gumbel_of_words(words)
    best, index = tl.max(choice, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * blocks + block, best)
    tl.store(token_ptr + row * blocks + block, first + block * BLOCK + index)
    tl.store(peak_ptr + row * blocks + block, peak)


@kernel
def _pick_kernel(  # type: ignore[no-untyped-def]
    best_ptr,
    token_ptr,
    peak_ptr,
    out_ptr,  # [R] int64
    invalid_ptr,  # [R] bool
    blocks,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    live = index < blocks
    best = tl.load(best_ptr + row * blocks + index, mask=live, other=float("-inf"))
    peak = tl.load(peak_ptr + row * blocks + index, mask=live, other=float("-inf"))
    _, block = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(token_ptr + row * blocks + block).to(tl.int64))
    top = tl.max(peak, axis=0)
    tl.store(invalid_ptr + row, (top == float("inf")) | (top == float("-inf")))


def sample_tokens_triton(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    floor: Tensor | None,
    all_greedy: bool,
) -> tuple[Tensor, Tensor]:
    rows, vocab = check_rows(logits, temperature=temperature, seed=seed, position=position)
    assert floor is None or floor.is_contiguous(), "floors must be contiguous"
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    invalid = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows == 0:
        return tokens, invalid
    blocks = cdiv(vocab, BLOCK)
    best, peak = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    draw_kernel[(rows, blocks)](
        logits,
        temperature,
        seed,
        position,
        temperature if floor is None else floor,
        best,
        index,
        peak,
        vocab,
        0,
        logits.stride(0),
        GREEDY_EPSILON,
        RANDOM=not all_greedy,
        FLOOR=floor is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _pick_kernel[(rows,)](
        best, index, peak, tokens, invalid, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1
    )
    return tokens, invalid


def _fake(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    floor: Tensor | None,
    all_greedy: bool,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.bool)


sample_tokens = register_op(
    "sample_tokens", sample_tokens_reference, mutates=(), fake=_fake, cuda=sample_tokens_triton
)
