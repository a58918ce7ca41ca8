"""What passes between target and draft on a decode node: the inputs of draft, verify and draft-extend.

Each phase has a type of its own, with static memory made once (`zeros`), views of its first rows (`first`), and an
idle batch of no rows (`first(0)`). Widths and dtypes come from `hidden_size_for` and `dtype_for` of the type and from
nowhere else: relay rows, graph buffers, idle batches, the hand-over and the handshake use the same two functions.
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
        """Views of the first rows."""
        views = {field.name: getattr(self, field.name)[:count] for field in fields(self)}  # type: ignore[arg-type]
        return replace(self, **views)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class EagleDraftInput(_Rows):
    """Draft steps start from the draft's own proposals and its own hidden state."""

    hidden_mode: ClassVar[CaptureHiddenMode] = CaptureHiddenMode.LAST
    probs: Tensor  # [B, k] float32, descending; of a multi-layer draft k is topk x steps (proposals_for)
    ids: Tensor  # [B, k] int64, ids of the target
    hidden: Tensor  # [B, carried_size_for]

    @staticmethod
    def hidden_size_for(draft: DraftConfig | None) -> int:
        """What one draft step gives to the next; 0: nothing."""
        return 0 if draft is None else draft_config.hidden_size_for(draft)

    @staticmethod
    def carried_size_for(draft: DraftConfig | None) -> int:
        """What travels with a request: as many hidden states as the next step, or the later modules, begin with."""
        if draft is None:
            return 0
        return draft_config.hidden_rows_for(draft) * draft_config.hidden_size_for(draft)

    @staticmethod
    def dtype_for(placement: Placement) -> torch.dtype:
        """The draft computes in the target's dtype."""
        return placement.dtype

    @classmethod
    def zeros(cls, rows: int, topk: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(
            torch.zeros(rows, topk, device=device),
            torch.zeros(rows, topk, dtype=torch.int64, device=device),
            torch.zeros(rows, hidden, dtype=dtype, device=device),
        )


@dataclass(frozen=True, slots=True)
class EagleVerifyInput(_Rows):
    """B trees of N nodes for the target. Node 0, the root, is the last drawn token.

    Parents come before their children, siblings hold distinct tokens.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, node index; of the root: -1
    depth: Tensor  # [B, N] int64
    mask: Tensor  # [B, N, N] bool, row n true for node n and its ancestors

    def paths(self) -> Tensor:
        """[B, N, N - 1] int64: tokens of each node and of its ancestors but for the root, -1 elsewhere."""
        return torch.where(self.mask[:, :, 1:], self.tokens[:, None, 1:], -1)

    @classmethod
    def zeros(cls, rows: int, nodes: int, device: torch.device) -> Self:
        """Chains of token 0."""
        index = torch.arange(nodes, device=device)
        return cls(
            torch.zeros(rows, nodes, dtype=torch.int64, device=device),
            (index - 1).repeat(rows, 1),
            index.repeat(rows, 1),
            (index[:, None] >= index).repeat(rows, 1, 1),
        )


@dataclass(frozen=True, slots=True)
class EagleDraftExtendInput(_Rows):
    """What was accepted, in a window of W tokens per request as if it had been a chain: the draft reads it again.

    Rows behind `accepted` mean nothing; the KV that they write is overwritten before it is read.
    """

    hidden_mode: ClassVar[CaptureHiddenMode] = CaptureHiddenMode.LAST
    start: Tensor  # [B] int64, position of the window's first row
    ids: Tensor  # [B, W] int64, what the target drew behind each
    hidden: Tensor  # [B, W, hidden_size_for], the target's
    accepted: Tensor  # [B] int64, drafts: row `accepted` of the window proposes next

    @staticmethod
    def hidden_size_for(draft: DraftConfig | None) -> int:
        """What the target gives to the draft per token; 0: nothing."""
        return 0 if draft is None else draft_config.target_width(draft)

    @staticmethod
    def dtype_for(placement: Placement) -> torch.dtype:
        """The target's."""
        return placement.dtype

    @classmethod
    def zeros(cls, rows: int, window: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Self:
        return cls(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, window, dtype=torch.int64, device=device),
            torch.zeros(rows, window, hidden, dtype=dtype, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )
