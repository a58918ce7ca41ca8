"""The feed-forward block of a mixture of experts: a router, the experts that it chooses, and shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import TokenSlots
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.blocks import FeedForward
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.router import ExpertRouter


class Experts(FeedForward):
    """The sum of share * expert(x) over the experts that the router chooses for x, and over the shared ones."""

    reads = DENSE  # the router, in any weight format

    def __init__(self, name: str, config: ModelConfig, weights: WeightFormat) -> None:
        super().__init__()
        assert config.experts is not None, "a layer with experts in a config without them"
        self.router = ExpertRouter(name, config.hidden_size, config.experts, weights.placement)
        self.experts = weights.experts(name, config.hidden_size, config.experts)

    def forward(self, x: Activations, slots: TokenSlots | None = None) -> Tensor:
        """Return [T, H]. Padding rows get no expert, so they read no weights, and their output is zero."""
        experts, shares = self.router(x.tensor(), slots)
        return self.experts.product(x, experts, shares)

    def add_norm(
        self, x: Activations, stream: Tensor, norm: RmsNorm, slots: TokenSlots | None = None
    ) -> tuple[Activations, Tensor]:
        total = self.experts.added(x, stream, self.router, slots)
        if total is not None:
            return Activations(norm(total)), total
        experts, shares = self.router(x.tensor(), slots)
        return self.experts.add_norm(x, experts, shares, stream, norm)

    def pieces(self) -> Iterator[Piece]:
        yield from self.router.pieces()
        yield from self.experts.pieces()
