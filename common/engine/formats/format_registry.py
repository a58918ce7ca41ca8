"""Makes the weight format that a checkpoint names; the formats' records are in common/checkpoint/weight_formats.py."""

from __future__ import annotations

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.weight_formats import format_record
from common.engine.layers.linear import WeightFormat
from common.engine.layers.placement import Placement
from common.named import named


def weight_format(config: ModelConfig, placement: Placement) -> WeightFormat:
    """Return the format of the checkpoint that `config` was read from."""
    made = named(format_record(config.weights.method).engine)(config.weights, placement)
    assert isinstance(made, WeightFormat)
    return made
