"""What the phases of a round leave for each other on the device. Allocated once, the first rows are the batch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.engine.forward.draft_inputs import EagleDraftExtendInput, EagleVerifyInput


@dataclass(frozen=True, slots=True)
class RoundState:
    """draft writes `tree`, verify reads it and writes `walk`, draft-extend reads that.

    Rows behind a batch hold what an earlier one left there: in range, and read by padding rows alone. Drafters of
    chains write tokens only: parents, depth and mask are those of a chain from the start.
    """

    tree: EagleVerifyInput
    walk: EagleDraftExtendInput

    @classmethod
    def allocate(
        cls,
        rows: int,
        nodes: int,
        depth: int,
        device: torch.device,
        hidden: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> RoundState:
        """Trees of N `nodes`, at most `depth` of them on a path; `hidden`: values that the draft reads of each."""
        return cls(
            EagleVerifyInput.zeros(rows, nodes, device),
            EagleDraftExtendInput.zeros(rows, depth, hidden, dtype, device),
        )
