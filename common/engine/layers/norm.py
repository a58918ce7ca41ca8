"""Norms with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.engine.layers.activations import DENSE, Reads
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.output_norm import add_normed, add_normed_rms_norm
from common.engine.ops.rms_norm import add_rms_norm, rms_norm
from common.engine.ops.sum_parts import sum_parts_rms_norm


class RmsNorm(nn.Module):
    """x / rms(x) * weight.

    Args:
        name: in the checkpoint, without `.weight`.
        reads: the forms that the products which take its output read.
        wide: the weight is float32, and the product is rounded once (see `ops/rms_norm`).
        offset: the checkpoint stores the weight minus 1; for wide norms.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        placement: Placement,
        reads: Reads = DENSE,
        wide: bool = False,
        offset: bool = False,
    ) -> None:
        super().__init__()
        assert wide or not offset, "the sum is rounded in another dtype than float32"
        self.name = name
        self.eps = eps
        self.reads = reads
        self._plus = 1.0 if offset else 0.0
        stored = replace(placement, dtype=torch.float32) if wide else placement
        self.weight = parameter((size,), stored)  # [size]

    @property
    def scale(self) -> Tensor:
        """The factors [size] of the normed values, for operations that fuse the norm with other work."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., size] for x [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_parts(self, parts: Tensor, experts: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(y + residual), y + residual), where y is the sum of the experts' outputs (`ops/sum_parts`)."""
        return sum_parts_rms_norm(parts, experts, residual, self.weight, self.eps)

    def add_normed(self, x: Tensor, residual: Tensor, before: RmsNorm) -> tuple[Tensor, Tensor]:
        """Return (norm(sum), sum) for sum = before(x) + residual."""
        assert before.eps == self.eps, "the norms of a layer have one eps"
        return add_normed_rms_norm(x, residual, before.weight, self.weight, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight, self._plus)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias, as vision towers have it.

    Args:
        name: in the checkpoint, without `.weight`.
    """

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight, self.bias = parameter((size,), placement), parameter((size,), placement)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight)
        yield Piece.all_of(f"{self.name}.bias", self.bias)


class NoNorm(nn.Module):
    """The identity, in place of a norm that a family does not have."""

    reads = DENSE

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_normed(self, x: Tensor, residual: Tensor, before: RmsNorm) -> tuple[Tensor, Tensor]:
        """Return the sum before(x) + residual twice."""
        total = add_normed(x, residual, before.weight, before.eps)
        return total, total

    def pieces(self) -> Iterator[Piece]:
        yield from ()


def model_norm(
    name: str, size: int, config: ModelConfig, placement: Placement, reads: Reads = DENSE
) -> RmsNorm:
    """Make a norm of the kind that the config's family uses everywhere."""
    wide, offset = config.norm_float32, config.norm_offset
    return RmsNorm(name, size, config.rms_norm_eps, placement, reads, wide, offset)
