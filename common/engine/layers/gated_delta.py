"""The gated delta block of a decoder layer (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

A convolution over the last tokens makes queries, keys and values, a state per value head takes the place of earlier
keys and values, and a gated norm per head precedes the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from common.checkpoint.gated_delta_config import KERNEL, GatedDeltaConfig
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import Parts, RowBlock, WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter

OPERATION = "common.engine.attention.gated_delta:gated_delta"


class GatedDelta(Mixer):
    """out(operation(in(x))).

    The rows of the input projection are [queries, keys, values, b, a, gates], whatever their order in the checkpoint.
    The state depends on all but the gates, so the values of a token that a window keeps are adjacent. A_log,
    dt_bias and the norm are float32 in any model.
    """

    def __init__(self, name: str, config: ModelConfig, layer: int, weights: WeightFormat) -> None:
        super().__init__()
        assert config.gated_delta is not None
        name, shape = f"{name}.linear_attn", config.gated_delta
        self.name, self.layer, self.width, self.eps = name, layer, shape.inner, config.rms_norm_eps
        rows = grouped_rows(name, shape) if shape.grouped_rows else separate_rows(name, shape)
        self.in_proj = weights.linear(config.hidden_size, rows, bias=False)
        self.out_proj = weights.linear(shape.inner, {f"{name}.out_proj": config.hidden_size}, bias=False)
        wide = Placement(torch.float32, weights.placement.device)
        self.taps = parameter((shape.channels, KERNEL), weights.placement)
        self.a_log = parameter((shape.value_heads,), wide)
        self.dt_bias = parameter((shape.value_heads,), wide)
        self.norm = parameter((shape.value_dim,), wide)
        self.reads = self.in_proj.reads

    def add_norm(
        self,
        x: Activations,
        stream: Tensor,
        norm: RmsNorm,
        angles: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> tuple[Activations, Tensor]:
        return self.out_proj.add_norm(self._mixed(x, attention), stream, norm)

    def forward(self, x: Activations, angles: tuple[Tensor, Tensor], attention: AttentionBackend) -> Tensor:
        return self.out_proj.product(self._mixed(x, attention))

    def _mixed(self, x: Activations, attention: AttentionBackend) -> Activations:
        projected = self.in_proj.product(x)
        weights = (self.taps, self.a_log, self.dt_bias, self.norm)
        return Activations(attention.mix(self.layer, OPERATION, projected, self.width, weights, self.eps))

    def pieces(self) -> Iterator[Piece]:
        yield from self.in_proj.pieces()
        yield from self.out_proj.pieces()
        yield Piece.all_of(f"{self.name}.conv1d.weight", self.taps.unsqueeze(1))
        yield Piece.all_of(f"{self.name}.A_log", self.a_log)
        yield Piece.all_of(f"{self.name}.dt_bias", self.dt_bias)
        yield Piece.all_of(f"{self.name}.norm.weight", self.norm)


def separate_rows(name: str, shape: GatedDeltaConfig) -> Parts:
    """Return the rows of the input projection in a checkpoint of Qwen3.5."""
    return {
        f"{name}.in_proj_qkv": shape.channels,
        f"{name}.in_proj_b": shape.value_heads,
        f"{name}.in_proj_a": shape.value_heads,
        f"{name}.in_proj_z": shape.inner,
    }


def grouped_rows(name: str, shape: GatedDeltaConfig) -> Parts:
    """Return the rows of the input projection in a checkpoint of Qwen3-Next.

    Its tensors have the rows of each key head together: [query | key | values | gates] and [b | a].
    """
    served = shape.value_heads // shape.key_heads
    values = served * shape.value_dim
    runs = {"in_proj_qkvz": (shape.key_dim, shape.key_dim, values, values), "in_proj_ba": (served, served)}

    def rows(tensor: str, index: int) -> Iterator[RowBlock]:
        """Yield the rows of run `index` of all key heads."""
        run = runs[tensor]
        size, first = sum(run), sum(run[:index])
        for head in range(shape.key_heads):
            yield RowBlock(f"{name}.{tensor}", run[index], head * size + first, shape.key_heads * size)

    order = [("in_proj_qkvz", 0), ("in_proj_qkvz", 1), ("in_proj_qkvz", 2)]
    order += [("in_proj_ba", 0), ("in_proj_ba", 1), ("in_proj_qkvz", 3)]
    return [block for tensor, index in order for block in rows(tensor, index)]
