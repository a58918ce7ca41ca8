"""Draws tokens from logits on the device, without a host synchronisation and independently of other rows.

A row's token depends on its logits, its parameters and the random words of (seed, position), and on nothing else in
the batch: a request that is retracted, resumed or moved draws the same tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from common.engine.host_copies import on_host
from common.engine.layers.logit_rows import LogitRows
from common.engine.ops.best_tokens import best_tokens, choose_tokens
from common.engine.ops.filter_floor import filter_floor
from common.engine.ops.sample_tokens import sample_tokens
from common.engine.sampling.logit_adjustments import Adjustments
from common.engine.sampling.logit_masks import LogitMasks
from common.messages.generation import GREEDY_EPSILON, OutputToken, TokenLogprob


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of R rows on the device, and facts known to the host that select the variant without a sync."""

    temperature: Tensor  # [R] float32; below GREEDY_EPSILON: argmax
    top_p: Tensor  # [R] float32; 1: off
    top_k: Tensor  # [R] int32; 0: off
    min_p: Tensor  # [R] float32; 0: off
    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64, sequence index of the token to be drawn
    all_greedy: bool  # no row is random
    any_filter: bool  # some row has top_p < 1, top_k > 0 or min_p > 0
    num_logprobs: int | None  # None: none; n: for the drawn token and the n likeliest ones
    adjust: Adjustments | None = None  # penalties, biases, withheld tokens; None: no row has any
    masks: LogitMasks | None = None  # tokens that grammars allow; None: no row has a grammar
    # [R, m] int64, tokens whose logprobs are wanted; None: no row wants any
    logprob_ids: Tensor | None = None


@dataclass(slots=True)
class SampleOutput:
    """Logprobs are natural logs under the raw logits, before penalties, biases, masks, temperature and filters."""

    token_ids: Tensor  # [R] int64
    invalid: Tensor  # [R] bool: the logits contain a NaN or have no finite maximum; the token is meaningless
    logprobs: Tensor | None = None  # [R] float32
    top_ids: Tensor | None = None  # [R, n] int64, likeliest first
    top_logprobs: Tensor | None = None  # [R, n] float32
    chosen: Tensor | None = None  # [R, m] float32, of `logprob_ids`
    # [R, H] the hidden states that the logits were computed from, where a step returns them; stays on the device
    hidden: Tensor | None = None

    def on_host(self) -> SampleOutput:
        """Return copies in host memory, readable once the stream reaches this point; nothing waits."""

        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else on_host(tensor)

        return SampleOutput(
            on_host(self.token_ids),
            on_host(self.invalid),
            maybe(self.logprobs),
            maybe(self.top_ids),
            maybe(self.top_logprobs),
            maybe(self.chosen),
        )


def sample_rows(rows: LogitRows, batch: SamplingBatch) -> SampleOutput:
    """Draw as `sample` does. Ranks with a part of the vocabulary each gather whole logits only where it takes them.

    That is for log-probabilities, adjustments and masks, and for filters, whose limits depend on all logits.
    """
    filtered = batch.any_filter and not batch.all_greedy
    changed = batch.adjust is not None or batch.masks is not None
    if not rows.divided or filtered or changed or batch.num_logprobs is not None:
        return sample(rows.whole(), batch)
    own = best_tokens(rows.share, batch.temperature, batch.seed, batch.position, rows.first, batch.all_greedy)
    return SampleOutput(*choose_tokens(rows.gathered(own)))


@torch.inference_mode()
def sample(logits: Tensor, batch: SamplingBatch) -> SampleOutput:
    """Draw one token per row of logits [R, V] float32, which only masks change."""
    # Computed first, because log-probabilities are those of the raw logits and masks change logits in place.
    logprobs = None if batch.num_logprobs is None else logits.log_softmax(-1)
    chosen = logits if batch.adjust is None else batch.adjust.apply(logits, batch.position)
    if batch.masks is not None:
        batch.masks.apply(chosen)
    floor = None
    if batch.any_filter and not batch.all_greedy:
        temperature = torch.where(batch.temperature < GREEDY_EPSILON, 1.0, batch.temperature)
        floor = filter_floor(chosen, temperature, batch.top_k, batch.top_p, batch.min_p)
    token_ids, invalid = sample_tokens(
        chosen, batch.temperature, batch.seed, batch.position, floor, batch.all_greedy
    )
    output = SampleOutput(token_ids, invalid)
    if batch.num_logprobs is not None:
        assert logprobs is not None
        output.logprobs = logprobs.gather(-1, token_ids[:, None])[:, 0]
        output.top_logprobs, output.top_ids = logprobs.topk(min(batch.num_logprobs, logits.shape[-1]), dim=-1)
        if batch.logprob_ids is not None:
            output.chosen = logprobs.gather(-1, batch.logprob_ids)
    return output


def read_tokens(
    output: SampleOutput, logprobs_of: Iterable[int | None], chosen_of: Iterable[int] = repeat(0)
) -> list[OutputToken | None]:
    """Return one token per row, None if its logits were not finite. Waits for the device: call it after completion.

    Args:
        logprobs_of: for each row, how many top log-probabilities its request wants; None: not even the token's own.
        chosen_of: for each row, how many of `chosen` are its own.
    """
    ids = output.token_ids.tolist()
    invalid = output.invalid.tolist()
    logprobs = output.logprobs.tolist() if output.logprobs is not None else None
    top_ids = output.top_ids.tolist() if output.top_ids is not None else None
    top_logprobs = output.top_logprobs.tolist() if output.top_logprobs is not None else None
    chosen = output.chosen.tolist() if output.chosen is not None else None
    tokens: list[OutputToken | None] = []
    for row, (wanted, own) in enumerate(zip(logprobs_of, chosen_of)):
        if invalid[row]:
            tokens.append(None)
        elif wanted is None or logprobs is None:
            tokens.append(OutputToken(ids[row]))
        else:
            assert top_ids is not None
            assert top_logprobs is not None
            top = tuple(top_ids[row][:wanted]), tuple(top_logprobs[row][:wanted])
            logprob = TokenLogprob(logprobs[row], *top, () if chosen is None else tuple(chosen[row][:own]))
            tokens.append(OutputToken(ids[row], logprob))
    return tokens
