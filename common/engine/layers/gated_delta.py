"""The gated delta block of a decoder layer (Qwen3-Next, Qwen3.5; arXiv 2412.06464).

A convolution over the last tokens makes queries, keys and values, a state per value head takes the place of earlier
keys and values, and a gated norm per head precedes the output projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from common.checkpoint.gated_delta_config import KERNEL
from common.checkpoint.model_config import ModelConfig
from common.engine.attention.backend import AttentionBackend
from common.engine.layers.activations import Activations
from common.engine.layers.blocks import Mixer
from common.engine.layers.linear import WeightFormat
from common.engine.layers.norm import RmsNorm
from common.engine.layers.parts import Parts, rows_of_parameter, runs_of
from common.engine.layers.piece import Piece
from common.engine.layers.placement import parameter
from common.kv_cache.gated_delta import DeltaHeadGroups, delta_heads

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
        name, shape, shard = f"{name}.linear_attn", config.gated_delta, weights.placement.shard
        heads = delta_heads(shape)
        self.name, self.layer, self.shard, self.eps = name, layer, shard, config.rms_norm_eps
        self.heads, self.width = heads, shard.width((heads.values,), name)
        rows = grouped_rows(name, heads) if shape.grouped_rows else separate_rows(name, heads)
        self.in_proj = weights.linear(config.hidden_size, rows, bias=False)
        self.out_proj = weights.linear(heads.values, {f"{name}.out_proj": config.hidden_size}, bias=False)
        wide = replace(weights.placement, dtype=torch.float32)
        states = shard.width((heads.states,), name)
        self.taps = parameter((shard.width(heads.channels, name), KERNEL), weights.placement)
        self.a_log = parameter((states,), wide)
        self.dt_bias = parameter((states,), wide)
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
        shard, states = self.shard, self.heads.states
        taps = runs_of(f"{self.name}.conv1d", *self.heads.channels)
        yield from rows_of_parameter(taps, shard, "weight", self.taps.unsqueeze(1))
        yield from rows_of_parameter({self.name: states}, shard, "A_log", self.a_log)
        yield from rows_of_parameter({self.name: states}, shard, "dt_bias", self.dt_bias)
        yield Piece.all_of(f"{self.name}.norm.weight", self.norm)


def separate_rows(name: str, heads: DeltaHeadGroups) -> Parts:
    """Return the rows of the input projection in a checkpoint of Qwen3.5."""
    return [
        *runs_of(f"{name}.in_proj_qkv", *heads.channels),
        *runs_of(f"{name}.in_proj_b", heads.states),
        *runs_of(f"{name}.in_proj_a", heads.states),
        *runs_of(f"{name}.in_proj_z", heads.values),
    ]


def grouped_rows(name: str, heads: DeltaHeadGroups) -> Parts:
    """Return the rows of the input projection in a checkpoint of Qwen3-Next.

    Its tensors have the rows of each key head together: [query | key | values | gates] and [b | a].
    """
    bundles = heads.keys.heads
    query, key, values, gates = runs_of(
        f"{name}.in_proj_qkvz", heads.keys, heads.keys, heads.values, heads.values, bundles=bundles
    )
    b, a = runs_of(f"{name}.in_proj_ba", heads.states, heads.states, bundles=bundles)
    return [query, key, values, b, a, gates]
