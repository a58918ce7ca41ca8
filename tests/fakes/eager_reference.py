"""Greedy continuations of one process without a cache, for formats whose activations are quantised while serving."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.models.causal_lm import CausalLM
from common.kv_cache.kv_values import AS_COMPUTED, KvValues
from tests.unit.engine.paged_driver import Driver

# Logits: other row counts may change an activation by one code, which can flip closer ties.
CLEAR = 0.25


@torch.inference_mode()
def greedy_until_a_tie(
    model: CausalLM, prompts: Sequence[list[int]], tokens: int, kv: KvValues = AS_COMPUTED
) -> list[list[int]]:
    """Return continuations up to the first near-tie; everything is recomputed for each token."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + tokens:
            logits = Driver(model, [torch.tensor(ids)], page_size=16, kv=kv).run([0], [len(ids)]).logits
            (first, second), (token, _) = (each.tolist() for each in logits[-1].topk(2))
            if first - second < CLEAR:
                break
            ids.append(token)
        found.append(ids[len(prompt) :])
    return found
