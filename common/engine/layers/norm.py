"""RMSNorm with its weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.layers.linear import Linear
from common.engine.layers.placement import Placement, parameter
from common.engine.ops.linear_norm import linear_add_rms_norm
from common.engine.ops.rms_norm import add_rms_norm, rms_norm


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter((size,), placement)  # [size]

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def behind(self, product: Linear, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(y + residual), y + residual) of y = product(x)."""
        return linear_add_rms_norm(x, product.weight, product.bias, residual, self.weight, self.eps)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.weight", self.weight
