"""The SwiGLU feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from common.engine.layers.activations import Activations
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        name: what stands before the names of its tensors in the checkpoint.
    """

    def __init__(
        self, name: str, hidden_size: int, intermediate_size: int, bias: bool, weights: WeightFormat
    ) -> None:
        super().__init__()
        parts = {f"{name}.gate_proj": intermediate_size, f"{name}.up_proj": intermediate_size}
        self.gate_up_proj = weights.linear(hidden_size, parts, bias)
        self.down_proj = weights.linear(intermediate_size, {f"{name}.down_proj": hidden_size}, bias)
        self.reads = self.gate_up_proj.reads

    def forward(self, x: Activations) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj.product(self._gated(x))

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        """Return (norm(y + stream), y + stream) of the block's output y; all [T, H]."""
        return self.down_proj.add_norm(self._gated(x), stream, norm)

    def pieces(self) -> Iterator[Piece]:
        yield from self.gate_up_proj.pieces()
        yield from self.down_proj.pieces()

    def _gated(self, x: Activations) -> Activations:
        return self.gate_up_proj.gated(x, self.down_proj.reads)
