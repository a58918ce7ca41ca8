"""A family that only tests have: layers with a latent plane, layers with a per-request state. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoint.families import Family, LayerKind
from common.checkpoint.model_config import ModelConfig
from common.kv_cache.layer_kinds import MixerRecord
from common.kv_cache.plane import HeadGroup, Kept, Owner, Plane

ARCHITECTURE = "ToyStateForCausalLM"
LATENT_VALUES = 6  # per token
KEY, VALUE = 4, 6  # per head of the state


def _latent_planes(owner: Owner, config: ModelConfig, layer: int, dtype: str) -> tuple[Plane, ...]:
    return (Plane(owner, layer, "latent", Kept.PAGED, (LATENT_VALUES,), dtype),)


def _state_planes(owner: Owner, config: ModelConfig, layer: int, dtype: str) -> tuple[Plane, ...]:
    entry, heads = (config.num_heads, KEY, VALUE), (HeadGroup(config.num_heads, 1),)
    return (Plane(owner, layer, "state", Kept.PER_REQUEST, entry, "float32", 0, heads),)


def _window(config: ModelConfig, layer: int) -> tuple[HeadGroup, ...]:
    """Return the size of a key, a value and a decay for each head: what a token adds to the state."""
    return (HeadGroup(config.num_heads, KEY + VALUE + 1),)


def _layer_kinds(raw: Mapping[str, Any], layers: int, where: str) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(mixer) for mixer in raw["mixers"])


LATENT = MixerRecord(_latent_planes, "tests.fakes.toy_state.mixers:LatentMixer")
RECURRENT = MixerRecord(_state_planes, "tests.fakes.toy_state.mixers:RecurrentMixer", _window)
FAMILY = Family(layer_kinds=_layer_kinds)

ROWS = (
    ("common.checkpoint.model_config:FAMILIES", f"{ARCHITECTURE}=tests.fakes.toy_state.record:FAMILY"),
    ("common.kv_cache.layer_kinds:MIXERS", "latent=tests.fakes.toy_state.record:LATENT"),
    ("common.kv_cache.layer_kinds:MIXERS", "recurrent=tests.fakes.toy_state.record:RECURRENT"),
)
