"""Sampling parameters of a step's rows, gathered from the relay state without a host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.kv_cache.relay_state import RelayState
from common.engine.sampler import SamplingBatch
from common.engine.sampling_plan import sampling_variant
from decode_node.request import DecodeRequest


def sampling_batch(
    relay: RelayState, requests: Sequence[DecodeRequest], rows: torch.Tensor, position: torch.Tensor
) -> SamplingBatch:
    """Parameters for draws at `position` [R] of relay rows `rows` [R]; `requests` are their owners, each once."""
    variant = sampling_variant(request.sampling for request in requests)
    return SamplingBatch(
        temperature=relay.temperature[rows],
        top_p=relay.top_p[rows],
        top_k=relay.top_k[rows],
        seed=relay.seed[rows],
        position=position,
        all_greedy=variant.all_greedy,
        any_filter=variant.any_filter,
        num_logprobs=variant.num_logprobs,
    )
