"""The dtype and device of a model's parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Placement:
    """dtype and device of parameters and activations."""

    dtype: torch.dtype
    device: torch.device


def parameter(shape: tuple[int, ...], placement: Placement) -> nn.Parameter:
    """Return an uninitialised parameter without gradient; `weights.load_weights` fills it."""
    return nn.Parameter(
        torch.empty(shape, dtype=placement.dtype, device=placement.device), requires_grad=False
    )
