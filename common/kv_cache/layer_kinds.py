"""The kinds of blocks that a decoder layer may have, one record each. No torch.

To add one, write a module in `common/engine/layers/` with its `Mixer` or `FeedForward`, a row here (for a mixer with
its per-request planes), and a family in `common/checkpoint/families.py` whose layers have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.checkpoint.model_config import EXPERTS, ModelConfig
from common.kv_cache.plane import HeadGroup, Owner, Plane, attention_layer
from common.kv_cache.shard import WHOLE, Shard
from common.named import named


@dataclass(frozen=True, slots=True)
class MixerRecord:
    """One kind of mixer."""

    # Maps (owner, config, layer, dtype of keys and values) to the planes of that layer.
    planes: Callable[[Owner, ModelConfig, int, str], tuple[Plane, ...]]
    engine: str  # "module:attribute" of its class
    # (config, layer) -> values of one new token that a decode node keeps until it knows whether the token was
    # accepted, in the model's dtype, as heads that ranks divide; (): none. A mixer with a per-request plane needs
    # them (docs/extending.md).
    window: Callable[[ModelConfig, int], tuple[HeadGroup, ...]] = lambda config, layer: ()
    chunk: int = 1  # prompts may be cut only at multiples of this many tokens


def _attention(owner: Owner, config: ModelConfig, layer: int, dtype: str) -> tuple[Plane, ...]:
    return attention_layer(owner, layer, config.num_kv_heads, config.head_dim, dtype)


ATTENTION = MixerRecord(_attention, "common.engine.layers.attention:Attention")

# LayerKind.mixer -> "module:attribute" of its MixerRecord
MIXERS = {
    "attention": "common.kv_cache.layer_kinds:ATTENTION",
    "gated_delta": "common.kv_cache.gated_delta:GATED_DELTA",
}
# LayerKind.feed_forward -> "module:attribute" of its class
FEED_FORWARDS = {
    "dense": "common.engine.layers.mlp:Mlp",
    EXPERTS: "common.engine.layers.experts:Experts",
}


def mixer_record(config: ModelConfig, layer: int) -> MixerRecord:
    """Return the record of a layer's mixer."""
    record = named(MIXERS[config.kind_of(layer).mixer])
    assert isinstance(record, MixerRecord)
    return record


def prompt_grid(config: ModelConfig, page_size: int) -> int:
    """Return the tokens at whose multiples a prompt may be cut into chunks; 1 if it may be cut anywhere.

    A grid of a mixer's also keeps pages whole.
    """
    chunks = {mixer_record(config, layer).chunk for layer in range(config.num_layers)}
    return 1 if chunks == {1} else math.lcm(page_size, *chunks)


def state_grid(config: ModelConfig, page_size: int) -> int:
    """Return the tokens at whose multiples the state of a prompt can be saved: whole pages, where chunks end."""
    return math.lcm(page_size, *(mixer_record(config, layer).chunk for layer in range(config.num_layers)))


def window_widths(config: ModelConfig, shard: Shard = WHOLE) -> dict[int, int]:
    """Return the values of each new token that a rank of a decode node keeps, by layer.

    Empty for a model without such layers.
    """
    groups = {layer: mixer_record(config, layer).window(config, layer) for layer in range(config.num_layers)}
    return {layer: shard.width(each, f"window of layer {layer}") for layer, each in groups.items() if each}
