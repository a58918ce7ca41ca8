"""Builds the model that a config names, by the classes in `FAMILIES` of `common/checkpoint/families.py`."""

from __future__ import annotations

from collections.abc import Sequence

from common.checkpoint.families import FAMILIES
from common.checkpoint.model_config import ModelConfig
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.named import named


def build_model(config: ModelConfig, placement: Placement, aux_layers: Sequence[int] = ()) -> CausalLM:
    """Return an uninitialised model of `config.architecture`, which `ModelConfig.load` has checked."""
    model = named(FAMILIES[config.architecture].engine)(config, placement, aux_layers)
    assert isinstance(model, CausalLM)
    return model
