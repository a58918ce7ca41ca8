"""The dtype and device of a model's parameters, and the share of the model that is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from common.engine.layers.ranks import ONE_RANK, Ranks
from common.kv_cache.shard import Shard


@dataclass(frozen=True, slots=True)
class Placement:
    """dtype and device of parameters and activations, on one of the node's ranks."""

    dtype: torch.dtype
    device: torch.device
    ranks: Ranks = ONE_RANK

    @property
    def shard(self) -> Shard:
        return self.ranks.shard


def parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    """Return an uninitialised parameter without gradient; `weights.load_weights` fills it."""
    return nn.Parameter(
        torch.empty(shape, dtype=placement.dtype, device=placement.device), requires_grad=False
    )
