"""Gathers the sampling parameters of a step's rows from the relay state, without host synchronization."""

from __future__ import annotations

from torch import Tensor

from common.engine.sampling.logit_adjustments import Adjustments
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import SamplingBatch
from common.engine.sampling.sampling_plan import SamplingVariant
from common.engine.state.relay_state import RelayState


def sampling_batch(
    relay: RelayState,
    rows: Tensor,
    position: Tensor,
    sampling: SamplingVariant,
    path: Tensor | None = None,
    masks: LogitMasks | None = None,
) -> SamplingBatch:
    """Return the parameters of R draws for relay rows `rows` [R] int64 at sequence positions `position` [R] int64.

    Args:
        sampling: the variant of the requests in those rows.
        path: [R, P] int64, if draws follow drafts: the drafts between a row's last token, which is left out, and the
            drawn position, in any order, padded with -1.
    """
    adjust = None
    if sampling.adjust is not None:
        path = rows.new_empty(len(rows), 0) if path is None else path
        adjust = Adjustments(relay.adjustments, rows, sampling.adjust, path)
    ids = None
    if sampling.logprob_ids:
        ids = relay.sampling.logprob_ids[:, : sampling.logprob_ids].index_select(0, rows)
    return SamplingBatch(
        temperature=relay.sampling.temperature.index_select(0, rows),
        top_p=relay.sampling.top_p.index_select(0, rows),
        top_k=relay.sampling.top_k.index_select(0, rows),
        min_p=relay.sampling.min_p.index_select(0, rows),
        seed=relay.sampling.seed.index_select(0, rows),
        position=position,
        all_greedy=sampling.all_greedy,
        any_filter=sampling.any_filter,
        num_logprobs=sampling.num_logprobs,
        logprob_ids=ids,
        adjust=adjust,
        masks=masks,
    )
