"""Adjustments of logits before a draw: penalties, biases, and tokens withheld until min_tokens.

Their state is on the device, one row per request, so that no step waits for it and no code loops over rows. It is
rebuilt from the request's text whenever the request enters a batch: at hand-over, resume and migration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.ops.mask_logits import WORD_BITS, mask_logits
from common.engine.ops.penalise import penalise
from common.engine.sampling.sampling_plan import AdjustmentFacts, adjustment_facts
from common.messages.generation import MAX_BIASES, MAX_STOP_IDS, SamplingParams

Numbers = Sequence[int] | Sequence[float] | npt.NDArray[np.int64]


def adjustment_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the device memory of AdjustmentRows."""
    per_row = 4 * vocab_size + 12 * (MAX_BIASES + MAX_STOP_IDS) + 3 * 4 + 8
    return (num_rows + 1) * per_row


@dataclass(slots=True)
class AdjustmentRows:
    """All tensors have num_rows + 1 rows; row 0 is padding. Rows without adjustments hold neutral values."""

    # [rows, V] int32: twice the count in the output, plus one if in the prompt; maintained only for penalised rows
    seen: Tensor
    repetition: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32
    bias_ids: Tensor  # [rows, MAX_BIASES] int64, filled up with 0
    bias: Tensor  # [rows, MAX_BIASES] float32, filled up with 0
    withheld_ids: Tensor  # [rows, MAX_STOP_IDS] int64, filled up with 0
    withheld: Tensor  # [rows, MAX_STOP_IDS] float32: -inf, filled up with 0
    free_at: Tensor  # [rows] int64: sequence index from which on nothing is withheld
    _used: set[int]  # rows that do not hold neutral values

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> AdjustmentRows:
        """Allocate the rows and compile the kernels that use them, so that no request waits for that."""
        rows = num_rows + 1

        def zeros(width: int | None, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows if width is None else (rows, width), dtype=dtype, device=device)

        made = cls(
            seen=zeros(vocab_size, torch.int32),
            repetition=zeros(None, torch.float32).fill_(1.0),
            presence=zeros(None, torch.float32),
            frequency=zeros(None, torch.float32),
            bias_ids=zeros(MAX_BIASES, torch.int64),
            bias=zeros(MAX_BIASES, torch.float32),
            withheld_ids=zeros(MAX_STOP_IDS, torch.int64),
            withheld=zeros(MAX_STOP_IDS, torch.float32),
            free_at=zeros(None, torch.int64),
            _used=set(),
        )
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        facts = AdjustmentFacts(penalties=True, biases=1, withheld=1)
        logits = torch.zeros(1, vocab_size, device=device)
        made.apply(logits, nowhere, nowhere, facts, nowhere[:, None])
        words = torch.zeros(1, -(-vocab_size // WORD_BITS), dtype=torch.int32, device=device)
        mask_logits(logits, words, nowhere)  # belongs to no row, but every draw may need it
        return made

    def write(
        self, row: int, sampling: SamplingParams, text: Sequence[int] | npt.NDArray[np.int64], outputs: int
    ) -> None:
        """Set a row for a request whose output is the last `outputs` tokens of `text`."""
        if adjustment_facts([sampling]) is None:
            if row not in self._used:
                return
            self._used.remove(row)
        else:
            self._used.add(row)
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.free_at[row] = len(text) - outputs + sampling.min_tokens
        ids, values = zip(*sampling.logit_bias) if sampling.logit_bias else ((), ())
        self._fill(self.bias_ids[row], ids)
        self._fill(self.bias[row], values)
        self._fill(self.withheld_ids[row], sampling.withheld)
        self._fill(self.withheld[row], [-torch.inf] * len(sampling.withheld))
        if sampling.penalised:
            seen, prompt = self.seen[row], len(text) - outputs
            seen.zero_()
            seen.index_fill_(0, self._to_device(text[:prompt], torch.int64), 1)
            said = self._to_device(text[prompt:], torch.int64)
            seen.index_add_(0, said, torch.full_like(said, 2, dtype=torch.int32))

    def count(self, rows: Tensor, tokens: Tensor, times: Tensor | int = 1) -> None:
        """Count tokens [B, n] int64 as output of rows [B] int64; `times` [B, n] selects them by 0 or 1."""
        flat = (rows[:, None] * self.seen.shape[1] + tokens).reshape(-1)
        more = (2 * torch.ones_like(tokens) * times).to(torch.int32).reshape(-1)
        self.seen.view(-1).index_add_(0, flat, more)

    def apply(
        self, logits: Tensor, rows: Tensor, position: Tensor, facts: AdjustmentFacts, path: Tensor
    ) -> Tensor:
        if facts.penalties:
            penalties = self.repetition, self.presence, self.frequency
            logits = penalise(logits, self.seen, rows, *penalties, path)
        else:
            logits = logits.clone()
        if facts.biases:
            ids, bias = self.bias_ids[:, : facts.biases], self.bias[:, : facts.biases]
            logits.scatter_add_(1, ids.index_select(0, rows), bias.index_select(0, rows))
        if facts.withheld:
            ids, gone = self.withheld_ids[:, : facts.withheld], self.withheld[:, : facts.withheld]
            early = (position < self.free_at.index_select(0, rows))[:, None]
            gone = torch.where(early, gone.index_select(0, rows), 0.0)
            logits.scatter_add_(1, ids.index_select(0, rows), gone)  # added, so that a NaN stays one
        return logits

    def _fill(self, row: Tensor, values: Numbers) -> None:
        row.copy_(self._to_device([*values, *[0] * (len(row) - len(values))], row.dtype))

    def _to_device(self, values: Numbers, dtype: torch.dtype) -> Tensor:
        tensor = torch.tensor(np.asarray(values), dtype=dtype)
        if self.seen.is_cuda:
            return tensor.pin_memory().to(self.seen.device, non_blocking=True)
        return tensor


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The adjustments of one draw: R rows of logits, each belonging to a request's row."""

    state: AdjustmentRows
    rows: Tensor  # [R] int64
    facts: AdjustmentFacts
    path: Tensor  # [R, P] int64, drafts before each row of logits, not counted in `state` yet; filled up with -1

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        """Return an adjusted copy of logits [R, V] float32; `position` [R] int64 is the sequence index of the drawn
        token.
        """
        return self.state.apply(logits, self.rows, position, self.facts, self.path)
