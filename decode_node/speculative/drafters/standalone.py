"""Drafts by a small language model of its own: a greedy chain. It reads nothing of the target, and keeps only KV."""

from __future__ import annotations

from dataclasses import replace

import torch

from common.engine.forward.batch import CaptureHiddenMode
from common.engine.model_runner import ModelRunner
from decode_node.speculative.drafters.drafter import Proposal, Round, Verified
from decode_node.speculative.tree import chain


class StandaloneDrafter:
    """Chains of `steps` drafts. The last draft is read too, for its KV: all drafts may be accepted."""

    needs_results = False
    hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, runner: ModelRunner, steps: int, page_size: int) -> None:
        self._runner = runner
        self._steps = steps
        self._page_size = page_size

    @property
    def nodes(self) -> int:
        return self._steps + 1

    @property
    def reach(self) -> int:
        return self.nodes

    def propose(self, batch: Round) -> Proposal:
        tokens = [batch.last_token]
        for step in range(self._steps):
            forward = batch.one_more(tokens[-1], batch.seq_len + step, self._page_size)
            tokens.append(self._runner(forward).logits.argmax(-1))
        last = batch.one_more(tokens[-1], batch.seq_len + self._steps, self._page_size)
        self._runner(replace(last, logits_rows=last.logits_rows[:0]))
        return Proposal(chain(torch.stack(tokens, dim=1)), [self._steps] * len(batch.requests))

    def absorb(self, batch: Round, verified: Verified) -> None:
        """KV of accepted drafts is in place; what was refused is overwritten."""
