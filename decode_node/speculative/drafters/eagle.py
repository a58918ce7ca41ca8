"""Drafts by an EAGLE head: a chain, each token from the draft's own hidden state of the one before.

State between rounds lives in the relay rows: the first draft (already proposed by the extend that ended the round
before, or by the prefill node) and the hidden state that the second one starts from.
"""

from __future__ import annotations

import torch

from common.engine.draft_runner import DraftRunner
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.kv_cache.relay_state import RelayState
from decode_node.speculative.drafters.drafter import Proposal, Round, Verified
from decode_node.speculative.tree import chain


class EagleDrafter:
    """Chains of `steps` drafts."""

    needs_results = False
    hidden_mode = CaptureHiddenMode.FULL

    def __init__(self, runner: DraftRunner, relay: RelayState, steps: int, page_size: int) -> None:
        self._runner = runner
        self._relay = relay
        self._steps = steps
        self._page_size = page_size

    @property
    def nodes(self) -> int:
        return self._steps + 1

    @property
    def reach(self) -> int:
        return self.nodes

    def propose(self, batch: Round) -> Proposal:
        """Step i reads draft i at position seq_len + i - 1; the first draft needs no step."""
        draft = self._relay.draft_ids[batch.rows][:, 0]
        hidden = self._relay.draft_hidden[batch.rows]
        tokens = [batch.last_token, draft]
        for step in range(1, self._steps):
            positions = batch.seq_len + (step - 1)
            state = self._runner.step(batch.one_more(draft, positions, self._page_size), hidden)
            draft, hidden = state.ids[:, 0], state.hidden
            tokens.append(draft)
        return Proposal(chain(torch.stack(tokens, dim=1)), [self._steps] * len(batch.requests))

    def absorb(self, batch: Round, verified: Verified) -> None:
        """Draft-extend: the round's rows again, now with the target's hidden states and the tokens it drew."""
        assert verified.hidden is not None
        path = verified.accepted.path
        count, window = path.shape
        width = verified.hidden.shape[-1]
        hidden = verified.hidden.view(count, -1, width).gather(1, path[:, :, None].expand(-1, -1, width))
        index = torch.arange(window, device=path.device)
        positions = batch.seq_len[:, None] + index
        select = torch.arange(count, device=path.device) * window + verified.accepted.drafts
        state = self._runner.extend(
            ForwardBatch(
                mode=ForwardMode.VERIFY,
                input_ids=verified.drawn.gather(1, path).view(-1),
                positions=positions.view(-1),
                kv_slots=batch.slots(positions, self._page_size).view(-1),
                page_table=batch.page_table,
                seq_lens=(batch.seq_len + window).to(torch.int32),
                query_start=(torch.arange(count + 1, device=path.device) * window).to(torch.int32),
                logits_rows=select,
                max_seq_len=batch.longest,
                tree_mask=(index[:, None] >= index).expand(count, -1, -1),
            ),
            hidden.reshape(-1, width),
        )
        self._relay.draft_ids[batch.rows] = state.ids
        self._relay.draft_p[batch.rows] = state.probs
        self._relay.draft_hidden[batch.rows] = state.hidden
