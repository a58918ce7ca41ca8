"""What attention reads of a prompt batch, in static tensors: a graph over few tokens then needs no break.

Attention of so few tokens takes no decision on the host: its kernel finds requests and lengths in device tensors. Each
break costs the device a wait for the next launch, which at 64 tokens is a sixth of the forward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from common.engine.attention.whole_prompt import MIN_TOKENS
from common.engine.forward.batch import ForwardBatch
from common.engine.graphs.slots import worst
from common.engine.graphs.spec import ShapeKey

UNBROKEN_TOKENS = 512  # below MIN_TOKENS of whole_prompt, from which on the host chooses the kernel
assert UNBROKEN_TOKENS < MIN_TOKENS
BROKEN = ShapeKey(0)  # the limit of graphs that all have breaks


class StaticExtend:
    """Page table and lengths of up to `limit.requests` requests with at most `limit.tokens` new tokens in all.

    `poisoned`: debug switch of `StaticInputs`, of the pages alone: that requests behind the live ones are empty is the
    contract itself.
    """

    def __init__(self, limit: ShapeKey, max_pages: int, device: torch.device, poisoned: bool = False) -> None:
        self._limit = limit
        self._poisoned = poisoned
        self._pages = torch.zeros(limit.requests, max_pages, dtype=torch.int32, device=device)
        self._starts = torch.zeros(limit.requests + 1, dtype=torch.int32, device=device)
        self._lens = torch.zeros(limit.requests, dtype=torch.int32, device=device)

    def serves(self, tokens: int) -> bool:
        """Whether a graph of so many tokens, padding included, has no breaks."""
        return tokens <= self._limit.tokens

    def load(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch over the static tensors, where it fits them. Requests behind the live ones have no tokens."""
        count, width = batch.page_table.shape
        if count > self._limit.requests:
            return batch  # only an eager run: no graph of this size has been admitted
        if self._poisoned:
            self._pages.fill_(worst(self._pages.dtype))
        self._pages[:count, :width].copy_(batch.page_table)
        self._starts[: count + 1].copy_(batch.query_start)
        self._starts[count + 1 :] = batch.query_start[-1]
        self._lens[:count].copy_(batch.seq_lens)
        self._lens[count:].zero_()
        return replace(batch, page_table=self._pages, query_start=self._starts, seq_lens=self._lens)
