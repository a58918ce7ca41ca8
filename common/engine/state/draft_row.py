"""The draft model's part of a request's relay row, on the host, as it is sent in a handoff record and joins a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HiddenDtype = Literal["", "float32", "bfloat16", "float16"]
ITEM_BYTES: dict[HiddenDtype, int] = {"": 0, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The per-request state of a draft model; empty by default."""

    topk: int = 0  # proposals of the first step, or of all steps of MTP modules
    hidden: int = 0  # values of the newest hidden state, or of one state per later module (models/mtp.py)
    dtype: HiddenDtype = "float32"  # the hidden state's
    vocab: int = 0  # ids are below it

    @property
    def dtype_name(self) -> HiddenDtype:
        """The dtype as a handoff record spells it; empty if no hidden state is sent."""
        return self.dtype if self.hidden else ""

    @property
    def hidden_bytes(self) -> int:
        return self.hidden * ITEM_BYTES[self.dtype]


NO_DRAFT_SHAPE = DraftShape()


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The draft's part of one row."""

    draft_topk_probs: tuple[float, ...] = ()  # [topk]
    draft_topk_ids: tuple[int, ...] = ()  # [topk]
    hidden: bytes = b""  # [hidden] of the draft's dtype

    def fits(self, shape: DraftShape) -> bool:
        """Return whether the sizes are those of `shape` and all ids are in its vocabulary."""
        return (
            len(self.draft_topk_ids) == len(self.draft_topk_probs) == shape.topk
            and len(self.hidden) == shape.hidden_bytes
            and all(0 <= token < shape.vocab for token in self.draft_topk_ids)
        )


NO_DRAFT = DraftRow()
