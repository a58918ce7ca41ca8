"""The host side of sampling on both nodes: which variant a batch needs, and whether a request ends. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.messages.generation import FINISH_LENGTH, FINISH_STOP, SamplingParams


@dataclass(frozen=True, slots=True)
class AdjustmentFacts:
    """The adjustments that a batch needs, as known to the host, and their widths."""

    penalties: bool  # some row has a penalty, so the tokens drawn must be counted
    biases: int  # entries of the longest bias
    withheld: int  # entries of the longest list of withheld tokens


def adjustment_facts(params: Iterable[SamplingParams]) -> AdjustmentFacts | None:
    """Return the facts of a batch; None if no logit is adjusted."""
    penalties, biases, withheld = False, 0, 0
    for each in params:
        penalties = penalties or each.penalised
        biases, withheld = max(biases, len(each.logit_bias)), max(withheld, len(each.withheld))
    return AdjustmentFacts(penalties, biases, withheld) if penalties or biases or withheld else None


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """The facts of a batch that select its sampling kernels without asking the device."""

    all_greedy: bool
    any_filter: bool
    num_logprobs: int | None
    adjust: AdjustmentFacts | None = None  # None: no logit is adjusted
    # A grammar or token rules may forbid tokens of some request: the draws wait for its mask.
    masked: bool = False
    logprob_ids: int = 0  # entries of the longest list of tokens whose log-probabilities a request wants


def sampling_variant(params: Iterable[SamplingParams], masked: bool = False) -> SamplingVariant:
    """Return the variant with the least work that serves every request of the batch.

    `masked`: whether some request needs a mask, which its parameters alone do not say.
    """
    params = list(params)
    all_greedy, any_filter, logprobs, logprob_ids = True, False, -1, 0
    for each in params:
        all_greedy = all_greedy and each.greedy
        any_filter = any_filter or each.filtered
        if each.logprobs is not None:
            logprobs, logprob_ids = max(logprobs, each.logprobs), max(logprob_ids, len(each.logprob_ids))
    return SamplingVariant(
        all_greedy=all_greedy,
        any_filter=any_filter,
        num_logprobs=None if logprobs < 0 else logprobs,
        adjust=adjustment_facts(params),
        masked=masked,
        logprob_ids=logprob_ids,
    )


class LatestVariant:
    """Computes the variant of a batch only if its requests or their parameters have changed."""

    def __init__(self) -> None:
        self._params: list[SamplingParams] = []
        self._variant = sampling_variant(())

    def of(self, params: Iterable[SamplingParams], masked: bool = False) -> SamplingVariant:
        """Return `sampling_variant` of the same arguments."""
        params = list(params)
        # The comparison of two lists takes the same objects as equal, so a step of the same requests costs next to
        # nothing.
        if params != self._params or masked != self._variant.masked:
            self._params, self._variant = params, sampling_variant(params, masked)
        return self._variant


def finish_reason(token_id: int, output_tokens: int, sampling: SamplingParams) -> str | None:
    """Return why a request ends with this token, its `output_tokens`-th, or None."""
    if token_id in sampling.stop_token_ids:
        return FINISH_STOP
    if output_tokens >= sampling.max_tokens:
        return FINISH_LENGTH
    return None
