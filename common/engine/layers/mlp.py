"""The SwiGLU feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.layers.linear import Linear
from common.engine.layers.placement import Placement
from common.engine.ops.linear import gated_linear


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, placement: Placement) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(hidden_size, parts, bias, placement)
        self.down_proj = Linear(intermediate_size, {"down_proj": hidden_size}, bias, placement)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        result: Tensor = self.down_proj(self.gated(x))
        return result

    def gated(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, intermediate]: what `down_proj` reads."""
        return gated_linear(x, self.gate_up_proj.weight, self.gate_up_proj.bias)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up_proj.checkpoint_tensors(prefix)
        yield from self.down_proj.checkpoint_tensors(prefix)
