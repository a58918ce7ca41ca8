"""The two mixers: each projects, runs its operation (operations.py) and projects back."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from tests.fakes.toy_state.record import KEY, LATENT_VALUES, VALUE


class OperationMixer(Mixer):
    """out(operation(in(x)))."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        layer: int,
        weights: WeightFormat,
        operation: str,
        widths: tuple[int, int],
    ) -> None:
        """`widths`: those of what the operation reads and returns."""
        super().__init__()
        self.layer, self.operation, self.width = (
            layer,
            f"tests.fakes.toy_state.operations:{operation}",
            widths[1],
        )
        self.inward = weights.linear(config.hidden_size, {f"{name}.{operation}.in": widths[0]}, bias=False)
        self.outward = weights.linear(widths[1], {f"{name}.{operation}.out": config.hidden_size}, bias=False)
        self.reads = self.inward.reads

    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        return self.outward.add_norm(self._mixed(x, attention), stream, norm)

    def forward(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        return self.outward.product(self._mixed(x, attention))

    def _mixed(self, x: Activations, attention: AttentionBackend) -> Activations:
        return Activations(attention.mix(self.layer, self.operation, self.inward.product(x), self.width))

    def pieces(self) -> Iterator[Piece]:
        yield from self.inward.pieces()
        yield from self.outward.pieces()


class LatentMixer(OperationMixer):
    """All heads attend to one latent per token, which is key and value; no positions."""

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        queries = config.num_heads * LATENT_VALUES
        super().__init__(name, config, layer, weights, "attend_latents", (queries + LATENT_VALUES, queries))


class RecurrentMixer(OperationMixer):
    """A linear recurrence: state = decay * state + key x value, read by a query."""

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        heads = config.num_heads
        widths = heads * (2 * KEY + VALUE + 1), heads * VALUE
        super().__init__(name, config, layer, weights, "recur", widths)
