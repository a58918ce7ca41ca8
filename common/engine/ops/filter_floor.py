"""Min-p, top-k and top-p reduced to one number per row: the smallest logit that all three keep."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.ops.logit_checks import check_rows
from common.engine.ops.registration import register_op
from common.engine.ops.triton_kernel import LOG2_E, kernel, tl

BLOCK = 8192


def filter_floor_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Apply min-p and top-k first, then top-p to the renormalised rest.

    Min-p keeps tokens that are at least min_p times as likely as the likeliest: those whose logit is at most
    -temperature * ln(min_p) below the largest. Top-p keeps the likeliest tokens until their mass reaches top_p,
    including the token that reaches it, and always at least one. Tokens exactly as likely as the last kept one are
    also kept, in whatever order they are.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32, above 0; affects top-p and min-p.
        top_k: [R] int32; 0: off.
        top_p: [R] float32; 1: off.
        min_p: [R] float32, at most 1; 0: off.

    Returns [R] float32, in the units of `logits`.
    """
    ordered = logits.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, logits.shape[-1]).clamp(max=logits.shape[-1]).long()[:, None] - 1
    floor = torch.maximum(ordered.gather(-1, last), ordered[:, :1] + (temperature * min_p.log())[:, None])
    ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    probs = (ordered / temperature[:, None]).softmax(-1)
    before = probs.cumsum(-1) - probs
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept[:, 0] = True
    return torch.maximum(floor[:, 0], ordered.masked_fill(~kept, torch.inf).amin(-1))


@kernel
def _weight(x, peak, slope, MASS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the weight of a logit: its probability up to a factor, or one."""
    if MASS:
        return tl.exp2((x - peak) * slope)
    else:
        return tl.where(x > float("-inf"), 1.0, 0.0)


@kernel
def _search(row_ptr, vocab, low, high, target, peak, slope, MASS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest logit x in low .. high such that the logits >= x weigh at least target; else `low`.

    The logits >= `low` do, and `high` is a logit. Bisection by value: each end moves to the nearest existing logit.
    """
    while low < high:
        middle = low + 0.5 * (high - low)
        middle = tl.where(middle > low, tl.minimum(middle, high), high)  # even if the width overflows
        weights = tl.zeros((BLOCK,), tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        below = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
            kept = x >= middle
            weights += tl.where(kept, _weight(x, peak, slope, MASS), 0.0)
            above = tl.where(kept, tl.minimum(above, x), above)
            below = tl.where(x < middle, tl.maximum(below, x), below)
        if tl.sum(weights, axis=0) >= target:
            low = tl.min(above, axis=0)
        else:
            high = tl.max(below, axis=0)
    return low


@kernel
def _filter_floor_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,  # [R, vocab]
    temperature_ptr,  # [R]
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    vocab,
    stride,
    slope,  # log2(e)
    BLOCK: tl.constexpr,
):
    """One program per row: some twenty passes over the row in the L2 cache, no sorting."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        least = tl.full((BLOCK,), float("inf"), tl.float32)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        finite = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
            live = x > float("-inf")
            least = tl.where(live, tl.minimum(least, x), least)
            most = tl.where(live, tl.maximum(most, x), most)
            finite += tl.where(live, 1.0, 0.0)
        low, peak = tl.min(least, axis=0), tl.max(most, axis=0)
        if (top_k > 0) & (top_k.to(tl.float32) <= tl.sum(finite, axis=0)):
            low = _search(row_ptr, vocab, low, peak, top_k.to(tl.float32), peak, slope, False, BLOCK)
            floor = low
        slope = slope / tl.load(temperature_ptr + row)
        if min_p > 0.0:
            low = tl.maximum(low, peak + tl.log2(min_p) / slope)
            floor = low
        if top_p < 1.0:
            weights = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab, BLOCK):
                token = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf"))
                weights += tl.where(x >= low, _weight(x, peak, slope, True), 0.0)
            target = top_p * tl.sum(weights, axis=0)
            floor = _search(row_ptr, vocab, low, peak, target, peak, slope, True, BLOCK)
    tl.store(out_ptr + row, floor)


def filter_floor_triton(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    rows, vocab = check_rows(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _filter_floor_kernel[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            vocab,
            logits.stride(0),
            LOG2_E,
            BLOCK=BLOCK,
            num_warps=32,
        )
    return out


def _fake(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0])


filter_floor = register_op(
    "filter_floor", filter_floor_reference, mutates=(), fake=_fake, cuda=filter_floor_triton
)
