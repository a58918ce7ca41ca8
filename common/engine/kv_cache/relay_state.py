"""What a running request carries from step to step, on the device, one row per request (row 0 is padding).

The row is the single source for hand-over, retraction, resume and migration. Speculation adds its columns (draft
top-k, hidden state) here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.messages.generation import SamplingParams


@dataclass(slots=True)
class RelayState:
    """All tensors are [num_rows + 1] on one device."""

    last_token: torch.Tensor  # int64, drawn but without KV yet
    seq_len: torch.Tensor  # int32, tokens with KV; last_token will be written at this position
    temperature: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int32, 0 = off
    seed: torch.Tensor  # int64

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> RelayState:
        rows = num_rows + 1

        def column(dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        return cls(
            last_token=column(torch.int64),
            seq_len=column(torch.int32),
            temperature=column(torch.float32),
            top_p=column(torch.float32, 1.0),
            top_k=column(torch.int32),
            seed=column(torch.int64),
        )

    def write_row(self, row: int, last_token: int, seq_len: int, sampling: SamplingParams) -> None:
        """Set all of a row: at hand-over and at resume."""
        assert row > 0, "row 0 is padding"
        self.last_token[row] = last_token
        self.seq_len[row] = seq_len
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.seed[row] = sampling.seed
