"""Static copies of the attention inputs of a prompt batch, for graphs without breaks.

They serve numbers of tokens for which attention makes no decision on the host: its kernel finds requests and lengths in
device tensors. Each break makes the device wait for the next launch; at 64 tokens that is a sixth of the forward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from common.engine.attention.whole_prompt import MIN_TOKENS
from common.engine.forward.batch import SAVES, BatchState, ForwardBatch
from common.engine.graphs.slots import poison_value
from common.engine.graphs.spec import ShapeKey
from common.engine.ops.held_requests import hold_requests

# With at most this many tokens the host chooses no kernel by lengths, whatever the GPU and the model are.
UNBROKEN_TOKENS = 512
assert UNBROKEN_TOKENS < MIN_TOKENS
BROKEN = ShapeKey(0)  # the limit if all graphs have breaks


class StaticExtend:
    """Page table and lengths of up to `limit.requests` requests with at most `limit.tokens` new tokens in total.

    `poisoned`: debug option of `StaticInputs`. It applies only to the page table, because requests past the live ones
    must be empty.
    """

    def __init__(self, limit: ShapeKey, max_pages: int, device: torch.device, poisoned: bool = False) -> None:
        self._limit = limit
        self.poisoned = poisoned
        self.pages = torch.zeros(limit.requests, max_pages, dtype=torch.int32, device=device)
        self.starts = torch.zeros(limit.requests + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(limit.requests, dtype=torch.int32, device=device)
        self._slots = torch.zeros(limit.requests, dtype=torch.int64, device=device)
        self._saves = torch.zeros(limit.requests, SAVES, 2, dtype=torch.int64, device=device)

    def serves(self, tokens: int) -> bool:
        """Return whether a graph of `tokens` tokens, padding included, has no breaks."""
        return tokens <= self._limit.tokens

    def load(self, batch: ForwardBatch) -> ForwardBatch:
        """Copy the batch to the static tensors if it fits. Requests past the live ones have no tokens."""
        count = len(batch.page_table)
        if count > self._limit.requests:
            return batch  # an eager run: no graph admits so many requests
        if self.poisoned:
            self.pages.fill_(poison_value(self.pages.dtype))
        live = batch.page_table, batch.query_start, batch.seq_lens
        hold_requests(*live, self.pages, self.starts, self.lens)
        state = None
        if batch.state is not None:
            self._slots[:count].copy_(batch.state.slots)
            self._slots[count:].zero_()
            self._saves.zero_()
            if batch.state.saves is not None:
                self._saves[:count].copy_(batch.state.saves)
            state = BatchState(self._slots, self._saves)
        return replace(batch, page_table=self.pages, query_start=self.starts, seq_lens=self.lens, state=state)
