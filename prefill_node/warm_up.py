"""Runs everything that follows the prompt graphs once before serving, so that its kernels are compiled by then."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.engine.sampling.sampler import SamplingBatch, sample_rows
from prefill_node.draft import PrefillDraft
from prefill_node.graphs.prefill_extend import PrefillExtend, idle_extend


@torch.inference_mode()
def warm_up(
    target: PrefillExtend,
    draft: PrefillDraft,
    page_size: int,
    device: torch.device,
    axes: tuple[int, ...] = (),
    state: bool = False,
) -> None:
    """Run one token in the padding page through layers, heads and every kind of sampling.

    `axes` and `state` as in `idle_extend`.
    """
    batch = replace(
        idle_extend(1, page_size, device, axes, state),
        logits_rows=torch.zeros(1, dtype=torch.int64, device=device),
        hidden_mode=draft.hidden_mode,
    )
    output = target(batch)
    one, zero = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    draft.warm_up(batch, output)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        sample_rows(
            output.rows,
            SamplingBatch(
                temperature=one,
                top_p=0.5 * one,
                top_k=torch.ones(1, dtype=torch.int32, device=device),
                min_p=torch.zeros_like(one),
                seed=zero,
                position=zero,
                all_greedy=all_greedy,
                any_filter=any_filter,
                num_logprobs=None,
            ),
        )
