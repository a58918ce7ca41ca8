"""RMSNorm with its weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.activations import DENSE, Reads
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.rms_norm import add_rms_norm, rms_norm
from common.engine.ops.sum_parts import sum_parts_rms_norm


class RmsNorm(nn.Module):
    """x / rms(x) * weight.

    Args:
        name: in the checkpoint, without `.weight`.
        reads: the forms that the products which take its output read.
        offset: the checkpoint stores the weight minus 1. The weight is then float32, and the product is rounded once
            (see `ops/rms_norm`).
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        placement: Placement,
        reads: Reads = DENSE,
        offset: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.reads = reads
        self._plus = 1.0 if offset else 0.0
        stored = replace(placement, dtype=torch.float32) if offset else placement
        self.weight = parameter((size,), stored)  # [size]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., size] for x [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_parts(self, parts: Tensor, experts: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(y + residual), y + residual), where y is the sum of the experts' outputs (`ops/sum_parts`)."""
        return sum_parts_rms_norm(parts, experts, residual, self.weight, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight, self._plus)


def model_norm(
    name: str, size: int, config: ModelConfig, placement: Placement, reads: Reads = DENSE
) -> RmsNorm:
    """Make a norm of the kind that the config's family uses everywhere."""
    return RmsNorm(name, size, config.rms_norm_eps, placement, reads, config.norm_offset)
