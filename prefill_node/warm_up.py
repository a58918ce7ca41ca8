"""Runs everything that follows the prompt graphs once before serving, so that its kernels are compiled by then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.engine.forward.batch import ForwardOutput
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
    prompts: Sequence[int] = (1,),
) -> None:
    """Run one token in the padding page through layers, heads and every kind of sampling.

    Args:
        axes, state: as in `idle_extend`.
        prompts: numbers of prompts that end in one forward; heads and sampling run for each of them.
    """
    for count in prompts:
        batch = replace(
            idle_extend(1, page_size, device, axes, state),
            logits_rows=torch.zeros(count, dtype=torch.int64, device=device),
            hidden_mode=draft.hidden_mode,
        )
        output = target(batch)
        draft.warm_up(batch, output)
        _sample(output, count, device)


def _sample(output: ForwardOutput, count: int, device: torch.device) -> None:
    one, zero = torch.ones(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        sample_rows(
            output.rows,
            SamplingBatch(
                temperature=one,
                top_p=0.5 * one,
                top_k=one.int(),
                min_p=torch.zeros_like(one),
                seed=zero,
                position=zero,
                all_greedy=all_greedy,
                any_filter=any_filter,
                num_logprobs=None,
            ),
        )
