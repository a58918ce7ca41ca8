"""Host side of sampling, for both nodes: which variant a batch needs, what was drawn, whether it ends there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.logit_adjustments import AdjustmentFacts, adjustment_facts
from common.engine.sampler import SampleOutput
from common.messages.generation import FINISH_LENGTH, FINISH_STOP, OutputToken, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """Facts of a batch that the host knows without asking the device."""

    all_greedy: bool
    any_filter: bool
    num_logprobs: int | None
    adjust: AdjustmentFacts | None = None  # None: every logit is taken as it is


def sampling_variant(params: Iterable[SamplingParams]) -> SamplingVariant:
    """The least work that serves every request of the batch."""
    params = list(params)
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingVariant(
        all_greedy=all(p.greedy for p in params),
        any_filter=any(p.filtered for p in params),
        num_logprobs=max(wanted) if wanted else None,
        adjust=adjustment_facts(params),
    )


def read_tokens(output: SampleOutput, params: Iterable[SamplingParams]) -> list[OutputToken | None]:
    """One token per row, None where the logits were not finite. Waits for the device: call after completion."""
    ids = output.token_ids.tolist()
    invalid = output.invalid.tolist()
    logprobs = output.logprobs.tolist() if output.logprobs is not None else None
    top_ids = output.top_ids.tolist() if output.top_ids is not None else None
    top_logprobs = output.top_logprobs.tolist() if output.top_logprobs is not None else None
    tokens: list[OutputToken | None] = []
    for row, wanted in enumerate(params):
        if invalid[row]:
            tokens.append(None)
        elif wanted.logprobs is None or logprobs is None:
            tokens.append(OutputToken(ids[row]))
        else:
            assert top_ids is not None
            assert top_logprobs is not None
            n = wanted.logprobs
            logprob = TokenLogprob(logprobs[row], tuple(top_ids[row][:n]), tuple(top_logprobs[row][:n]))
            tokens.append(OutputToken(ids[row], logprob))
    return tokens


def finish_reason(token_id: int, output_tokens: int, sampling: SamplingParams) -> str | None:
    """Why a request ends with this token, its `output_tokens`-th, or None."""
    if token_id in sampling.stop_token_ids:
        return FINISH_STOP
    if output_tokens >= sampling.max_tokens:
        return FINISH_LENGTH
    return None
