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
from common.engine.ops.sample_tokens import sample_tokens
from common.engine.sampling.sampling_plan import AdjustmentFacts, adjustment_facts
from common.messages.generation import MAX_BIASES, MAX_STOP_IDS, SamplingParams

Numbers = Sequence[int] | Sequence[float] | npt.NDArray[np.int64]


def adjustment_bytes(num_rows: int, vocab_size: int) -> int:
    """Return the device memory of AdjustmentRows."""
    per_row = 4 * vocab_size + 12 * (MAX_BIASES + MAX_STOP_IDS) + 3 * 4 + 8
    return (num_rows + 1) * per_row


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of each row."""

    # [rows, V] int32: twice the count in the output, plus one if in the prompt; maintained only for penalised rows
    seen: Tensor
    repetition: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values to add to the logits of some tokens of each row, filled up with 0 for token 0."""

    ids: Tensor  # [rows, n] int64
    values: Tensor  # [rows, n] float32

    @classmethod
    def zeros(cls, rows: int, width: int, device: torch.device) -> TokenValues:
        ids = torch.zeros((rows, width), dtype=torch.int64, device=device)
        return cls(ids, torch.zeros((rows, width), dtype=torch.float32, device=device))

    def of_rows(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first `count` ids and values of rows [R] int64."""
        return self.ids[:, :count].index_select(0, rows), self.values[:, :count].index_select(0, rows)


@dataclass(slots=True)
class AdjustmentRows:
    """All tensors have num_rows + 1 rows; row 0 is padding. Rows without adjustments hold neutral values."""

    penalties: Penalties
    bias: TokenValues  # MAX_BIASES wide
    withheld: TokenValues  # MAX_STOP_IDS wide; the values are -inf
    free_at: Tensor  # [rows] int64: sequence index from which on nothing is withheld
    _used: set[int]  # rows that do not hold neutral values

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> AdjustmentRows:
        """Allocate the rows and compile the kernels that use them, so that no request waits for that."""
        rows = num_rows + 1

        def column(fill: float) -> Tensor:
            return torch.full((rows,), fill, dtype=torch.float32, device=device)

        made = cls(
            Penalties(
                seen=torch.zeros((rows, vocab_size), dtype=torch.int32, device=device),
                repetition=column(1.0),
                presence=column(0.0),
                frequency=column(0.0),
            ),
            bias=TokenValues.zeros(rows, MAX_BIASES, device),
            withheld=TokenValues.zeros(rows, MAX_STOP_IDS, device),
            free_at=torch.zeros(rows, dtype=torch.int64, device=device),
            _used=set(),
        )
        nowhere = torch.zeros(1, dtype=torch.int64, device=device)
        facts = AdjustmentFacts(penalties=True, biases=1, withheld=1)
        logits = torch.zeros(1, vocab_size, device=device)
        made.apply(logits, nowhere, nowhere, facts, nowhere[:, None])
        words = torch.zeros(1, -(-vocab_size // WORD_BITS), dtype=torch.int32, device=device)
        # These belong to no row, but ranks draw from whole logits only for requests that have adjustments or the like.
        mask_logits(logits, words, nowhere)
        for all_greedy in (True, False):
            sample_tokens(logits, column(0.0)[:1], nowhere, nowhere, None, all_greedy)
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
        penalties = self.penalties
        # Not `penalties.repetition[row] = ...`, which waits for the running step on a GPU.
        penalties.repetition[row].fill_(sampling.repetition_penalty)
        penalties.presence[row].fill_(sampling.presence_penalty)
        penalties.frequency[row].fill_(sampling.frequency_penalty)
        self.free_at[row].fill_(len(text) - outputs + sampling.min_tokens)
        ids, values = zip(*sampling.logit_bias) if sampling.logit_bias else ((), ())
        self._fill(self.bias.ids[row], ids)
        self._fill(self.bias.values[row], values)
        self._fill(self.withheld.ids[row], sampling.withheld)
        self._fill(self.withheld.values[row], [-torch.inf] * len(sampling.withheld))
        if sampling.penalised:
            seen, prompt = penalties.seen[row], len(text) - outputs
            seen.zero_()
            seen.index_fill_(0, self._to_device(text[:prompt], torch.int64), 1)
            drawn = self._to_device(text[prompt:], torch.int64)
            seen.index_add_(0, drawn, torch.full_like(drawn, 2, dtype=torch.int32))

    def count(self, rows: Tensor, tokens: Tensor, times: Tensor | int = 1) -> None:
        """Count tokens [B, n] int64 as output of rows [B] int64; `times` [B, n] selects them by 0 or 1."""
        seen = self.penalties.seen
        flat = (rows[:, None] * seen.shape[1] + tokens).reshape(-1)
        more = (2 * torch.ones_like(tokens) * times).to(torch.int32).reshape(-1)
        seen.view(-1).index_add_(0, flat, more)

    def apply(
        self, logits: Tensor, rows: Tensor, position: Tensor, facts: AdjustmentFacts, path: Tensor
    ) -> Tensor:
        if facts.penalties:
            each = self.penalties
            logits = penalise(logits, each.seen, rows, each.repetition, each.presence, each.frequency, path)
        else:
            logits = logits.clone()
        if facts.biases:
            logits.scatter_add_(1, *self.bias.of_rows(rows, facts.biases))
        if facts.withheld:
            ids, gone = self.withheld.of_rows(rows, facts.withheld)
            early = (position < self.free_at.index_select(0, rows))[:, None]
            # Added, so that a NaN stays one.
            logits.scatter_add_(1, ids, torch.where(early, gone, 0.0))
        return logits

    def _fill(self, row: Tensor, values: Numbers) -> None:
        row.copy_(self._to_device([*values, *[0] * (len(row) - len(values))], row.dtype))

    def _to_device(self, values: Numbers, dtype: torch.dtype) -> Tensor:
        tensor = torch.tensor(np.asarray(values), dtype=dtype)
        if self.free_at.is_cuda:
            return tensor.pin_memory().to(self.free_at.device, non_blocking=True)
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
