"""The data that target and draft exchange on a decode node: inputs of draft, verify and draft-extend.

Each phase has its own type, with static memory made once (`zeros`), views of its first rows (`first`), and an idle
batch without rows (`first(0)`). Widths and dtypes come only from `hidden_size_for` and `dtype_for` of the type: relay
rows, graph buffers, idle batches, the hand-over and the handshake use the same two functions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from common.checkpoint import draft_config
from common.checkpoint.draft_config import DraftConfig
from common.engine.forward.batch import CaptureHiddenMode
from common.engine.layers.placement import Placement


class _Rows:
    """A dataclass of tensors, all with one row per request."""

    __slots__ = ()

    def first(self, count: int) -> Self:
        """Return views of the first rows."""
        views = {field.name: getattr(self, field.name)[:count] for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **views)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class DraftInput(_Rows):
    """The input of draft steps: the draft's own proposals and its own hidden state."""

    hidden_mode: ClassVar[CaptureHiddenMode] = CaptureHiddenMode.LAST
    # [B, k] float32, descending; k is topk x steps for MTP modules (proposals_for)
    draft_topk_probs: Tensor
    draft_topk_ids: Tensor  # [B, k] int64, in the target's vocabulary
    hidden: Tensor  # [B, carried_size_for]

    @staticmethod
    def hidden_size_for(draft: DraftConfig | None) -> int:
        """Return the width that one draft step passes to the next; 0: nothing."""
        return 0 if draft is None else draft_config.hidden_size_for(draft)

    @staticmethod
    def carried_size_for(draft: DraftConfig | None) -> int:
        """Return the width that a request carries: the hidden states that the next step, or the later modules, begin
        with.
        """
        if draft is None:
            return 0
        return draft_config.hidden_rows_for(draft) * draft_config.hidden_size_for(draft)

    @staticmethod
    def dtype_for(placement: Placement) -> torch.dtype:
        """Return the target's dtype, in which the draft computes too."""
        return placement.dtype

    @classmethod
    def zeros(cls, rows: int, topk: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(
            torch.zeros(rows, topk, device=device),
            torch.zeros(rows, topk, dtype=torch.int64, device=device),
            torch.zeros(rows, hidden, dtype=dtype, device=device),
        )


@dataclass(frozen=True, slots=True)
class TreeVerifyInput(_Rows):
    """B trees of N nodes for the target. Node 0, the root, is the last drawn token.

    Parents come before their children, siblings hold distinct tokens.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node index; -1 for the root
    depth: Tensor  # [B, N] int64
    mask: Tensor  # [B, N, N] bool, row n true for node n and its ancestors

    def paths(self) -> Tensor:
        """Return [B, N, N - 1] int64: the tokens of each node and its ancestors except the root, -1 elsewhere."""
        return torch.where(self.mask[:, :, 1:], self.tokens[:, None, 1:], -1)

    @classmethod
    def zeros(cls, rows: int, nodes: int, device: torch.device) -> Self:
        """Return chains of token 0."""
        index = torch.arange(nodes, device=device)
        return cls(
            torch.zeros(rows, nodes, dtype=torch.int64, device=device),
            (index - 1).repeat(rows, 1),
            index.repeat(rows, 1),
            (index[:, None] >= index).repeat(rows, 1, 1),
        )


@dataclass(frozen=True, slots=True)
class DraftExtendInput(_Rows):
    """The accepted tokens in a window of W tokens per request, as if they were a chain: the draft reads them again.

    Rows after `accepted` are meaningless; the KV that they write is overwritten before it is read.
    """

    hidden_mode: ClassVar[CaptureHiddenMode] = CaptureHiddenMode.LAST
    start: Tensor  # [B] int64, position of the window's first row
    ids: Tensor  # [B, W] int64, the token that the target drew after each row
    hidden: Tensor  # [B, W, hidden_size_for], the target's hidden states
    accepted: Tensor  # [B] int64, number of drafts: row `accepted` of the window proposes next

    @staticmethod
    def hidden_size_for(draft: DraftConfig | None) -> int:
        """Return the width that the target passes to the draft per token; 0: nothing."""
        return 0 if draft is None else draft_config.target_width(draft)

    @staticmethod
    def dtype_for(placement: Placement) -> torch.dtype:
        """Return the target's dtype."""
        return placement.dtype

    @classmethod
    def zeros(cls, rows: int, window: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, window, dtype=torch.int64, device=device),
            torch.zeros(rows, window, hidden, dtype=dtype, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )
