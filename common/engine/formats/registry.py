"""Which format a model's products have."""

from __future__ import annotations

from common.engine.formats.dense import DenseFormat
from common.engine.layers.linear import WeightFormat
from common.engine.layers.placement import Placement
from common.model_config import ModelConfig


def weight_format(config: ModelConfig, placement: Placement) -> WeightFormat:
    """Return the format of the checkpoint that `config` was read from; today all are dense."""
    return DenseFormat(placement)
