"""Draws from logits of which each rank of a node has a part: every rank finds its best token, then one of them wins.

The draw of `sample_tokens` is an argmax over perturbed logits, so the best of the ranks' best tokens is the token that
one rank would draw from all logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.logit_checks import check_rows
from common.engine.ops.philox import token_words
from common.engine.ops.registration import register_op
from common.engine.ops.sample_tokens import BLOCK, draw_kernel, gumbel
from common.engine.ops.triton_kernel import cdiv, kernel, next_power_of_2, tl
from common.messages.generation import GREEDY_EPSILON

VALUE, TOKEN, PEAK, FIELDS = 0, 1, 2, 3  # columns of candidates


def best_tokens_reference(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, first: int, all_greedy: bool
) -> Tensor:
    """Return this rank's candidates [R, FIELDS] int32.

    A candidate is the bits of its perturbed logit (float32), its token, and the bits of the largest raw logit, which
    is not finite if one of the raw logits is NaN.

    Args:
        logits: [R, C] float32, of the tokens from `first` on.
        temperature, seed, position, all_greedy: as for `sample_tokens`.
    """
    peak = logits.amax(-1)
    scores = logits
    if not all_greedy:
        greedy = (temperature < GREEDY_EPSILON)[:, None]
        noise = gumbel(token_words(seed, position, logits.shape[-1], first))
        scores = torch.where(greedy, logits, logits / torch.where(greedy, 1.0, temperature[:, None]) + noise)
    token = scores.argmax(-1, keepdim=True)
    value = scores.gather(-1, token)
    fields = value.view(torch.int32), (token + first).to(torch.int32), peak[:, None].view(torch.int32)
    return torch.cat(fields, dim=-1)


@kernel
def _candidate_kernel(  # type: ignore[no-untyped-def]
    best_ptr,  # [R, blocks] float32
    token_ptr,  # [R, blocks] int32
    peak_ptr,  # [R, blocks] float32
    out_ptr,  # [R, 3] int32
    blocks,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    live = index < blocks
    best = tl.load(best_ptr + row * blocks + index, mask=live, other=float("-inf"))
    peak = tl.load(peak_ptr + row * blocks + index, mask=live, other=float("-inf"))
    value, block = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row * 3, value.to(tl.int32, bitcast=True))
    tl.store(out_ptr + row * 3 + 1, tl.load(token_ptr + row * blocks + block))
    tl.store(out_ptr + row * 3 + 2, tl.max(peak, axis=0).to(tl.int32, bitcast=True))


def best_tokens_triton(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, first: int, all_greedy: bool
) -> Tensor:
    rows, columns = check_rows(logits, temperature=temperature, seed=seed, position=position)
    out = torch.empty((rows, FIELDS), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    blocks = cdiv(columns, BLOCK)
    best, peak = torch.empty((2, rows, blocks), dtype=torch.float32, device=logits.device)
    index = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    draw_kernel[(rows, blocks)](
        logits,
        temperature,
        seed,
        position,
        temperature,
        best,
        index,
        peak,
        columns,
        first,
        logits.stride(0),
        GREEDY_EPSILON,
        RANDOM=not all_greedy,
        FLOOR=False,
        BLOCK=BLOCK,
        num_warps=8,
    )
    _candidate_kernel[(rows,)](best, index, peak, out, blocks, BLOCKS=next_power_of_2(blocks), num_warps=1)
    return out


def _fake(
    logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor, first: int, all_greedy: bool
) -> Tensor:
    return logits.new_empty((logits.shape[0], FIELDS), dtype=torch.int32)


best_tokens = register_op(
    "best_tokens", best_tokens_reference, mutates=(), fake=_fake, cuda=best_tokens_triton
)


def winning_tokens(candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens [R] int64, invalid [R] bool), as `sample_tokens` does, for the candidates of all ranks.

    Args:
        candidates: [R, ranks, FIELDS] int32; the ranks are in the order of their tokens, so that the lowest token wins
            among equals.
    """
    values, peaks = (candidates[..., field].contiguous().view(torch.float32) for field in (VALUE, PEAK))
    winner = values.argmax(-1, keepdim=True)
    tokens = candidates[..., TOKEN].gather(-1, winner)[:, 0].to(torch.int64)
    return tokens, ~peaks.amax(-1).isfinite()


def _fake_winners(candidates: Tensor) -> tuple[Tensor, Tensor]:
    rows = candidates.shape[0]
    return candidates.new_empty(rows, dtype=torch.int64), candidates.new_empty(rows, dtype=torch.bool)


choose_tokens = register_op("choose_tokens", winning_tokens, mutates=(), fake=_fake_winners)
