"""Which architecture is built how.

To add a model: describe its config.json in `common/model_config.py` (`FAMILIES`), name its builder here, and
add a small config to `tests/unit/engine/families.py`, which holds it against transformers. A model that is
not a Llama-like decoder gets its own file beside `llama.py`, composed from `engine/layers`, with the same
methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from common.engine.layers.placement import Placement
from common.engine.models.llama import LlamaForCausalLM
from common.model_config import ModelConfig

Builder = Callable[[ModelConfig, Placement, Sequence[int]], LlamaForCausalLM]

BUILDERS: Mapping[str, Builder] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,  # sliding windows: ModelConfig.sliding_windows
    "Qwen2ForCausalLM": LlamaForCausalLM,  # biases: ModelConfig.qkv_bias
    "Qwen3ForCausalLM": LlamaForCausalLM,  # norms of queries and keys: ModelConfig.qk_norm
}


def build_model(
    config: ModelConfig, placement: Placement, aux_layers: Sequence[int] = ()
) -> LlamaForCausalLM:
    """An uninitialised model of `config.architecture`, which `ModelConfig.load` has checked."""
    return BUILDERS[config.architecture](config, placement, aux_layers)
