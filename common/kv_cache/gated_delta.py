"""The planes and the window of a gated delta layer. No torch."""

from __future__ import annotations

from typing import NamedTuple

from common.checkpoint.gated_delta_config import KERNEL, GatedDeltaConfig
from common.checkpoint.model_config import ModelConfig
from common.kv_cache.layer_kinds import MixerRecord
from common.kv_cache.plane import HeadGroup, Kept, Owner, Plane

CHUNK = 64  # tokens of one chunk of the prompt form, whose grid begins at position 0


class DeltaHeadGroups(NamedTuple):
    """The heads of a gated delta layer that ranks divide among themselves."""

    keys: HeadGroup  # heads of the queries, and of the keys
    values: HeadGroup  # heads of the values, the gates and the output
    states: HeadGroup  # one value per value head, such as each of the two that control its state

    @property
    def channels(self) -> tuple[HeadGroup, ...]:
        """The channels of the convolution."""
        return self.keys, self.keys, self.values

    @property
    def token_values(self) -> tuple[HeadGroup, ...]:
        """The values of one token that the state depends on."""
        return *self.channels, self.states, self.states


def delta_heads(shape: GatedDeltaConfig) -> DeltaHeadGroups:
    """Return the heads of a layer of this shape."""
    values = HeadGroup(shape.value_heads, shape.value_dim)
    return DeltaHeadGroups(HeadGroup(shape.key_heads, shape.key_dim), values, HeadGroup(shape.value_heads, 1))


def _config(config: ModelConfig) -> GatedDeltaConfig:
    assert config.gated_delta is not None
    return config.gated_delta


def _planes(owner: Owner, config: ModelConfig, layer: int, dtype: str) -> tuple[Plane, ...]:
    """Return the last inputs of the convolution, and the state of each value head."""
    shape = _config(config)
    heads = delta_heads(shape)
    conv = (shape.channels, KERNEL - 1)
    recurrent = (shape.value_heads, shape.key_dim, shape.value_dim)
    return (
        Plane(owner, layer, "conv", Kept.PER_REQUEST, conv, dtype, 0, heads.channels),
        Plane(owner, layer, "recurrent", Kept.PER_REQUEST, recurrent, "float32", 0, (heads.states,)),
    )


def _window(config: ModelConfig, layer: int) -> tuple[HeadGroup, ...]:
    """Return the inputs of one token as they were projected, which the model's dtype represents exactly."""
    return delta_heads(_config(config)).token_values


GATED_DELTA = MixerRecord(_planes, "common.engine.layers.gated_delta:GatedDelta", _window, CHUNK)
