"""The token masks of one draw, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.host_copies import send
from common.engine.ops.mask_logits import mask_logits


@dataclass(frozen=True, slots=True)
class LogitMasks:
    """Masks of R rows of logits; several rows may share one."""

    words: Tensor  # [M, ceil(V / 32)] int32, M at least 1; see ops/mask_logits.py
    owner: Tensor  # [R] int64: the mask of each row of logits; -1: the row is not masked

    @classmethod
    def on_device(
        cls, words: npt.NDArray[np.int32], rows: Sequence[int], num_rows: int, device: torch.device
    ) -> LogitMasks:
        """Copy masks to the device without waiting; `rows[i]` is the row of logits that words[i] belongs to."""
        owner = np.full(num_rows, -1, dtype=np.int64)
        owner[list(rows)] = np.arange(len(rows))
        return cls(*send((words, owner), device))

    def apply(self, logits: Tensor) -> None:
        """Set the logits [R, V] of tokens outside the masks to minus infinity, in place."""
        mask_logits(logits, self.words, self.owner)
