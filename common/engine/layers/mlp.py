"""The gated feed-forward block: SwiGLU or GeGLU."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import TokenSlots
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import FeedForward
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import Parts, runs_of
from common.engine.layers.piece import Piece
from common.kv_cache.plane import HeadGroup


class Mlp(FeedForward):
    """down(act(gate(x)) * up(x)), where act is `config.activation`."""

    def __init__(self, name: str, config: ModelConfig, weights: WeightFormat) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        divided = HeadGroup(inner, 1)
        parts: Parts = {f"{name}.mlp.gate_proj": divided, f"{name}.mlp.up_proj": divided}
        if config.fused:
            parts = runs_of(f"{name}.mlp.gate_up_proj", divided, divided)
        self._activation = config.activation
        self.gate_up_proj = weights.linear(size, parts, bias)
        self.down_proj = weights.linear(divided, {f"{name}.mlp.down_proj": size}, bias)
        self.reads = self.gate_up_proj.reads

    def forward(self, x: Activations) -> Tensor:
        return self.down_proj.product(self._gated(x))

    def add_norm(
        self, x: Activations, stream: Tensor, norm: RmsNorm, slots: TokenSlots | None = None
    ) -> tuple[Activations, Tensor]:
        return self.down_proj.add_norm(self._gated(x), stream, norm)

    def pieces(self) -> Iterator[Piece]:
        yield from self.gate_up_proj.pieces()
        yield from self.down_proj.pieces()

    def _gated(self, x: Activations) -> Activations:
        return self.gate_up_proj.gated(x, self.down_proj.reads, self._activation)
