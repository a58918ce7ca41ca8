"""What a drafter is: it proposes a tree per request and sees what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from decode_node.request import DecodeRequest
from decode_node.speculative.tree import DraftTree
from decode_node.speculative.verifier import Accepted


@dataclass(frozen=True, slots=True)
class Round:
    """The batch of one step, as it is before anything is drafted."""

    requests: Sequence[DecodeRequest]
    rows: Tensor  # [B] int64, rows of the relay state
    last_token: Tensor  # [B] int64, drawn but without KV
    seq_len: Tensor  # [B] int64, tokens with KV: last_token stands at this position
    page_table: Tensor  # [B, pages] int32, page 0 behind a request's own pages
    longest: int  # host upper bound of seq_len + reach

    def slots(self, positions: Tensor, page_size: int) -> Tensor:
        """KV slots of positions [B, n]."""
        page = self.page_table.gather(1, positions // page_size).to(positions.dtype)
        return page * page_size + positions % page_size

    def one_more(self, ids: Tensor, positions: Tensor, page_size: int) -> ForwardBatch:
        """A draft forward of one token per request: ids [B] at positions [B]."""
        rows = torch.arange(len(ids) + 1, device=ids.device)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=ids,
            positions=positions,
            kv_slots=self.slots(positions[:, None], page_size)[:, 0],
            page_table=self.page_table,
            seq_lens=(positions + 1).to(torch.int32),
            query_start=rows.to(torch.int32),
            logits_rows=rows[:-1],
            max_seq_len=self.longest,
        )


@dataclass(frozen=True, slots=True)
class Verified:
    """What the target made of a round of N nodes."""

    drawn: Tensor  # [B, N] int64, the token behind each node
    accepted: Accepted
    hidden: Tensor | None  # [B * N, H'], as the drafter's hidden_mode asks


@dataclass(frozen=True, slots=True)
class Proposal:
    """Trees to verify, and how many of their nodes are real drafts: the others only fill the shape."""

    trees: DraftTree
    drafted: Sequence[int]  # [B]


class Drafter(Protocol):
    """Proposes the same number of nodes for every request of every round, the root included."""

    @property
    def nodes(self) -> int: ...

    @property
    def reach(self) -> int:
        """KV slots behind a request's length that a round writes, at least `nodes`."""
        ...

    @property
    def needs_results(self) -> bool:
        """It reads the text that the host knows."""
        ...

    @property
    def hidden_mode(self) -> CaptureHiddenMode:
        """What it reads of the target's verify forward."""
        ...

    def propose(self, batch: Round) -> Proposal: ...

    def absorb(self, batch: Round, verified: Verified) -> None:
        """After the round: prepare the state that the next one starts from."""
        ...
