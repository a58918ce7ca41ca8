"""Device state that the phases of a round pass on. It is allocated once; a batch uses its first rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.engine.forward.draft_inputs import DraftExtendInput, TreeVerifyInput


@dataclass(frozen=True, slots=True)
class RoundState:
    """The draft phase writes `tree`; verify reads it and writes `walk`, which draft-extend reads.

    Rows past a batch keep values of earlier batches, which are in range and only read by padding rows. Drafters of
    chains write only tokens: parents, depth and mask are initialized to a chain.
    """

    tree: TreeVerifyInput
    walk: DraftExtendInput

    def drafts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and parents [count, nodes - 1] of the first trees without their roots."""
        tree = self.tree.first(count)
        return tree.tokens[:, 1:], tree.parents[:, 1:]

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
        """Allocate for trees of `nodes`, at most `depth` per path; the draft reads `hidden` values of each node."""
        return cls(
            TreeVerifyInput.zeros(rows, nodes, device),
            DraftExtendInput.zeros(rows, depth, hidden, dtype, device),
        )
