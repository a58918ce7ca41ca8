"""Logits to tokens on the device, without a host synchronisation and without looking at other rows.

A row's token depends on its logits, its parameters and the random words of (seed, position), and on nothing
else in
the batch: a request that is retracted, resumed or moved draws the same tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.ops.philox import token_words
from common.messages.generation import GREEDY_EPSILON


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of R rows on the device, and host facts that choose the variant without a sync."""

    temperature: Tensor  # [R] float32; below GREEDY_EPSILON: argmax
    top_p: Tensor  # [R] float32; 1: off
    top_k: Tensor  # [R] int32; 0: off
    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64, sequence index of the token to be drawn
    all_greedy: bool  # no row is random
    any_filter: bool  # some row has top_p < 1 or top_k > 0
    num_logprobs: int | None  # None: none; n: of the drawn and of the n likeliest tokens


@dataclass(slots=True)
class SampleOutput:
    """Logprobs are natural logs under the raw logits, before temperature and filters."""

    token_ids: Tensor  # [R] int64
    invalid: Tensor  # [R] bool: the logits hold a NaN or no finite maximum; the token means nothing
    logprobs: Tensor | None = None  # [R] float32
    top_ids: Tensor | None = None  # [R, n] int64, likeliest first
    top_logprobs: Tensor | None = None  # [R, n] float32


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> SampleOutput:
    """Draw one token per row of logits [R, V] float32."""
    greedy_ids = logits.argmax(-1)  # the lowest index among equals
    token_ids = greedy_ids
    if not batch.all_greedy:
        greedy = batch.temperature < GREEDY_EPSILON
        token_ids = torch.where(greedy, greedy_ids, _draw(logits, batch, greedy))
    output = SampleOutput(token_ids, ~logits.amax(-1).isfinite())
    if batch.num_logprobs is not None:
        logprobs = logits.log_softmax(-1)
        output.logprobs = logprobs.gather(-1, token_ids[:, None])[:, 0]
        output.top_logprobs, output.top_ids = logprobs.topk(min(batch.num_logprobs, logits.shape[-1]), dim=-1)
    return output


def _draw(logits: Tensor, batch: SamplingBatch, greedy: Tensor) -> Tensor:
    """Gumbel-max: argmax(scaled + g) with independent Gumbel g is a draw from softmax(scaled). [R] int64."""
    scaled = logits / torch.where(greedy, 1.0, batch.temperature)[:, None]
    if batch.any_filter:
        scaled = filter_top_k_top_p(scaled, batch.top_k, batch.top_p)
    return (scaled + gumbel(token_words(batch.seed, batch.position, logits.shape[-1]))).argmax(-1)


def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise -log(-log(u)), float32 and finite, from random words below 2**32 (int64).

    With u = 1 - v the inner logarithm is log1p(-v), exact for small v, and those make the winning values.
    """
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return torch.log1p(-v).neg_().log_().neg_()


def filter_top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits [R, V] with -inf for what the filters remove: top-k first, then top-p of the renormalised rest.

    Top-p keeps the likeliest tokens until their mass reaches top_p, the one that reaches it included, and
    always at least one. Tokens exactly as likely as the last one kept are kept too, whatever their order.
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k, scaled.shape[-1]).clamp(max=scaled.shape[-1]).long()[:, None] - 1
    floor = ordered.gather(-1, last)
    ordered = ordered.masked_fill(ordered < floor, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    kept = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept[:, 0] = True
    floor = torch.maximum(floor, ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True))
    return scaled.masked_fill(scaled < floor, -torch.inf)
