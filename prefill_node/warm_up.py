"""What follows the graphs of a prompt, run once before serving: its kernels compile now, not at the first prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.engine.cuda_graph.draft_prefill import DraftPrefill
from common.engine.cuda_graph.prefill_extend import PrefillExtend, idle_extend
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.ops.keep_hidden import keep_hidden
from common.engine.sampler import SamplingBatch, sample


@torch.inference_mode()
def warm_up(
    target: PrefillExtend,
    drafts: Sequence[DraftPrefill | PrefillExtend],
    hidden_mode: CaptureHiddenMode,
    page_size: int,
    device: torch.device,
    axes: tuple[int, ...] = (),
) -> None:
    """One token in the padding page through the layers, the heads and every kind of draw. Writes no request's page.

    axes: of the model's RopeConfig.
    """
    batch = replace(
        idle_extend(1, page_size, device, axes),
        logits_rows=torch.zeros(1, dtype=torch.int64, device=device),
        hidden_mode=hidden_mode,
    )
    output = target(batch)
    one, zero = torch.ones(1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for draft in drafts:
        if isinstance(draft, DraftPrefill):
            assert output.hidden is not None
            draft(batch, output.hidden)
    if output.hidden is not None and len(drafts) > 1:  # what multi_layer.py does between two modules
        keep_hidden(output.hidden, zero, torch.zeros_like(output.hidden)[:, None], 0, zero + 1, zero)
    for all_greedy, any_filter in ((True, False), (False, False), (False, True)):
        sample(
            output.logits,
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
