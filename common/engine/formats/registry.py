"""Makes the weight format that a checkpoint's config names; its record stands in `common/weight_formats.py`."""

from __future__ import annotations

from common.engine.layers.linear import WeightFormat
from common.engine.layers.placement import Placement
from common.model_config import ModelConfig
from common.named import named
from common.weight_formats import format_record


def weight_format(config: ModelConfig, placement: Placement) -> WeightFormat:
    """Return the format of the checkpoint that `config` was read from."""
    made = named(format_record(config.weights.method).engine)(config.weights, placement)
    assert isinstance(made, WeightFormat)
    return made
