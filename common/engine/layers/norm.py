"""RMSNorm with its weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.layers.activations import DENSE, Reads
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.rms_norm import add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    """x / rms(x) * weight.

    Args:
        name: in the checkpoint, without `.weight`.
        reads: the forms that the products which take its output read.
    """

    def __init__(self, name: str, size: int, eps: float, placement: Placement, reads: Reads = DENSE) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.reads = reads
        self.weight = parameter((size,), placement)  # [size]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., size] for x [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def pieces(self) -> Iterator[Piece]:
        yield Piece.all_of(f"{self.name}.weight", self.weight)
