"""A group whose collectives wait for no other rank; used while graphs are captured."""

from __future__ import annotations

import torch
from torch import Tensor

from common.engine.collectives.group import CollectiveGroup


class FakeGroup(CollectiveGroup):
    """Returns tensors of the right shape, with values of this rank only."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        return x.new_zeros((*x.shape[:-1], columns))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def check(self) -> None:
        """No-op: no other rank can fail."""

    def close(self) -> None:
        """No-op: nothing is held."""
