"""Maps each row of a decode batch to its state slot and to the window of tokens that the state does not hold yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.engine.forward.batch import BatchState
from common.engine.host_copies import RowCopies


class WindowShape(NamedTuple):
    """Shape of the window that a model with per-request planes keeps per row; empty for other models."""

    widths: Mapping[int, int] = {}  # layer -> values of one token
    tokens: int = 0  # maximum number of new tokens of a request in one step
    dtype: torch.dtype = torch.float32

    def nbytes(self, num_rows: int) -> int:
        """Return the bytes of `num_rows` rows and padding row 0."""
        return (num_rows + 1) * self.tokens * sum(self.widths.values()) * self.dtype.itemsize


NO_WINDOW = WindowShape()


@dataclass(frozen=True, slots=True)
class StateRows:
    """State slots and windows, one row per request as in RelayState; row 0 is padding and stays zero."""

    slots: Tensor  # [num_rows + 1] int64 of the per-request planes
    held: Tensor  # [num_rows + 1] int64: tokens that the state in that slot holds
    windows: dict[int, Tensor]  # layer -> [num_rows + 1, tokens, width] of the tokens from `held` on

    @classmethod
    def allocate(cls, num_rows: int, shape: WindowShape, device: torch.device) -> StateRows:
        windows = {
            layer: torch.zeros(num_rows + 1, shape.tokens, width, dtype=shape.dtype, device=device)
            for layer, width in shape.widths.items()
        }
        slots, held = torch.zeros(2, num_rows + 1, dtype=torch.int64, device=device)
        return cls(slots, held, windows)

    def write_row(self, row: int, slot: int, tokens: int) -> None:
        """Assign the state in `slot`, which holds the first `tokens` tokens of the request, to a row."""
        # Not `self.slots[row] = slot`, which waits for the running step on a GPU.
        self.slots[row].fill_(slot)
        self.held[row].fill_(tokens)

    def open_window(self, rows: Tensor, seq_len: Tensor) -> BatchState:
        """Return the state of a forward over requests with seq_len [R] int64 accepted tokens. No host sync.

        Must be called exactly once for each forward. The forward adds the tokens between what the state holds and
        `seq_len`, so the new window begins at `seq_len`.
        """
        # The rows of a round are a column of its placements, and kernels read dense indices.
        rows = rows.contiguous()
        pending = seq_len - self.held.index_select(0, rows)
        self.held.index_copy_(0, rows, torch.where(rows > 0, seq_len, 0))
        return BatchState(self.slots.index_select(0, rows), rows=rows, pending=pending, windows=self.windows)

    @property
    def row_copies(self) -> RowCopies:
        """Copies of how many tokens the state of a row holds, and of its window; a row that is written needs a slot."""
        return RowCopies((self.held, *self.windows.values()))
