"""The state of running requests between steps, on the device, one row per request (row 0 is padding).

The row is the single source for hand-over, retraction, resume and migration. It includes a draft model's state, in
columns of width 0 if there is no draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from common.engine.forward.draft_inputs import DraftInput
from common.engine.host_copies import RowCopies, send, send_one
from common.engine.sampling.logit_adjustments import AdjustmentRows
from common.engine.state.draft_row import NO_DRAFT, NO_DRAFT_SHAPE, DraftRow, DraftShape, HiddenDtype
from common.engine.state.state_rows import NO_WINDOW, StateRows, WindowShape
from common.messages.generation import MAX_LOGPROB_IDS, SamplingParams


def hidden_dtype(dtype: torch.dtype) -> HiddenDtype:
    """Return the name of a floating dtype in a `DraftShape` and in a handoff record."""
    return cast("HiddenDtype", str(dtype).removeprefix("torch."))


def draft_rows(draft: DraftInput) -> list[DraftRow]:
    """Convert device rows. Waits for the device."""
    probs, ids = draft.draft_topk_probs.tolist(), draft.draft_topk_ids.tolist()
    hidden = draft.hidden.cpu().contiguous().view(torch.uint8).numpy()
    return [DraftRow(tuple(p), tuple(i), h.tobytes()) for p, i, h in zip(probs, ids, hidden)]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the next token of each row."""

    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int32, 0 = off
    min_p: torch.Tensor  # float32, 0 = off
    seed: torch.Tensor  # int64
    # [rows, MAX_LOGPROB_IDS] int64: entries that a request does not fill hold arbitrary tokens of the vocabulary
    logprob_ids: torch.Tensor

    def write(self, row: int, sampling: SamplingParams) -> None:
        # Not `self.temperature[row] = ...`, which waits for the running step on a GPU.
        self.temperature[row].fill_(sampling.temperature)
        self.top_p[row].fill_(sampling.top_p)
        self.top_k[row].fill_(sampling.top_k)
        self.min_p[row].fill_(sampling.min_p)
        self.seed[row].fill_(sampling.seed)
        if sampling.logprob_ids:
            ids = np.asarray(sampling.logprob_ids, dtype=np.int64)
            self.logprob_ids[row, : len(ids)] = send_one(ids, self.logprob_ids.device)


@dataclass(slots=True)
class RelayState:
    """All tensors have num_rows + 1 rows on one device."""

    last_token: torch.Tensor  # int64, drawn, without KV yet
    seq_len: torch.Tensor  # int32, tokens with KV; last_token will be written at this position
    # int64, rotary position minus sequence index after the prompt (rotary_places.py)
    rope_delta: torch.Tensor
    sampling: SamplingRows
    draft: DraftInput  # for the next step; [rows, topk] proposals and [rows, hidden]
    adjustments: AdjustmentRows
    state: StateRows | None = None  # for models with per-request planes

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        draft: DraftShape = NO_DRAFT_SHAPE,
        window: WindowShape = NO_WINDOW,
    ) -> RelayState:
        rows = num_rows + 1

        def column(dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        dtype: torch.dtype = getattr(torch, draft.dtype)
        return cls(
            last_token=column(torch.int64),
            seq_len=column(torch.int32),
            rope_delta=column(torch.int64),
            sampling=SamplingRows(
                temperature=column(torch.float32),
                top_p=column(torch.float32, 1.0),
                top_k=column(torch.int32),
                min_p=column(torch.float32),
                seed=column(torch.int64),
                logprob_ids=torch.zeros((rows, MAX_LOGPROB_IDS), dtype=torch.int64, device=device),
            ),
            draft=DraftInput.zeros(rows, draft.topk, draft.hidden, dtype, device),
            adjustments=AdjustmentRows.allocate(num_rows, vocab_size, device),
            state=StateRows.allocate(num_rows, window, device) if window.widths else None,
        )

    def write_row(
        self,
        row: int,
        text: Sequence[int],
        outputs: int,
        sampling: SamplingParams,
        draft: DraftRow = NO_DRAFT,
        rope_delta: int = 0,
        slot: int = 0,
    ) -> None:
        """Set all of a row, at hand-over and at resume, for a request whose last token has no KV yet.

        Does not wait for the device, where a step is running.

        Args:
            text: prompt and output; the last `outputs` tokens are output.
            slot: of per-request state, which holds all of the text but its last token.
        """
        assert row > 0, "row 0 is padding"
        assert bool(slot) == (self.state is not None), "a slot where the model keeps state, and nowhere else"
        if self.state is not None:
            self.state.write_row(row, slot, len(text) - 1)
        self.last_token[row].fill_(text[-1])
        self.seq_len[row].fill_(len(text) - 1)
        self.rope_delta[row].fill_(rope_delta)
        self.sampling.write(row, sampling)
        self.adjustments.write(row, sampling, text, outputs)
        self.write_draft_row(row, draft)

    def write_draft_row(self, row: int, draft: DraftRow) -> None:
        """Set the draft's part of a row; no-op for a request without one."""
        if draft.draft_topk_ids:
            probs = np.asarray(draft.draft_topk_probs, dtype=np.float32)
            ids = np.asarray(draft.draft_topk_ids, dtype=np.int64)
            # A copy, because torch does not accept read-only memory.
            hidden = np.frombuffer(draft.hidden, dtype=np.uint8).copy()
            # Pinned, since a copy from pageable memory would wait for the running step.
            sent = send((probs, ids, hidden), self.draft.draft_topk_probs.device)
            self.draft.draft_topk_probs[row], self.draft.draft_topk_ids[row] = sent[0], sent[1]
            if draft.hidden:
                self.draft.hidden[row] = sent[2].view(self.draft.hidden.dtype)

    @property
    def _draft_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.draft.draft_topk_probs, self.draft.draft_topk_ids, self.draft.hidden

    def draft_input(self, rows: torch.Tensor) -> DraftInput:
        """Return the inputs of the draft in rows [R]."""
        return DraftInput(*(column.index_select(0, rows) for column in self._draft_columns))

    def write_draft(self, rows: torch.Tensor, draft: DraftInput) -> None:
        """Set the draft's next inputs in rows [R]; padding rows 0 stay zero."""
        self.write_proposal(rows, draft.draft_topk_probs, draft.draft_topk_ids)
        live = (rows > 0)[:, None]
        self.draft.hidden.index_copy_(0, rows, torch.where(live, draft.hidden, 0))

    def write_proposal(
        self, rows: torch.Tensor, draft_topk_probs: torch.Tensor, draft_topk_ids: torch.Tensor
    ) -> None:
        """Set only the drafts: MTP modules store hidden states themselves (ops/keep_hidden)."""
        live = (rows > 0)[:, None]
        self.draft.draft_topk_probs.index_copy_(0, rows, torch.where(live, draft_topk_probs, 0))
        self.draft.draft_topk_ids.index_copy_(0, rows, torch.where(live, draft_topk_ids, 0))

    @property
    def draft_copies(self) -> RowCopies:
        """Copies of the draft's part of a row."""
        return RowCopies(self._draft_columns)
