"""The planes and the window of a gated delta layer. No torch."""

from __future__ import annotations

from common.checkpoint.gated_delta_config import KERNEL, GatedDeltaConfig
from common.checkpoint.model_config import ModelConfig
from common.kv_cache.layer_kinds import MixerRecord
from common.kv_cache.plane import HeadGroup, Kept, Owner, Plane

CHUNK = 64  # tokens of one chunk of the prompt form, whose grid begins at position 0


def _config(config: ModelConfig) -> GatedDeltaConfig:
    assert config.gated_delta is not None
    return config.gated_delta


def _planes(owner: Owner, config: ModelConfig, layer: int, dtype: str) -> tuple[Plane, ...]:
    """Return the last inputs of the convolution, and the state of each value head."""
    shape = _config(config)
    keys = HeadGroup(shape.key_heads, shape.key_dim)
    conv = (shape.channels, KERNEL - 1)
    groups = (keys, keys, HeadGroup(shape.value_heads, shape.value_dim))
    recurrent = (shape.value_heads, shape.key_dim, shape.value_dim)
    heads = (HeadGroup(shape.value_heads, 1),)
    return (
        Plane(owner, layer, "conv", Kept.PER_REQUEST, conv, dtype, 0, groups),
        Plane(owner, layer, "recurrent", Kept.PER_REQUEST, recurrent, "float32", 0, heads),
    )


def _window(config: ModelConfig, layer: int) -> int:
    """Return the inputs of one token as they were projected, which the model's dtype represents exactly."""
    return _config(config).token_values


GATED_DELTA = MixerRecord(_planes, "common.engine.layers.gated_delta:GatedDelta", _window, CHUNK)
