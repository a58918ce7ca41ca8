"""What a LLaVA checkpoint says about its vision part: tower, projector, placeholders. No torch.

The engine builds the tower from `tower_options` with transformers' own classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError
from common.json_fields import positive, section, token_id

ARCHITECTURES = ("LlavaForConditionalGeneration",)
TOWERS: Mapping[str, Mapping[str, int]] = {  # model_type -> what its config.json may leave out
    "clip_vision_model": {"image_size": 224, "patch_size": 32, "num_hidden_layers": 12},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16, "num_hidden_layers": 12},
}
LANGUAGE_MODELS = {  # model_type of text_config -> its architecture
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LANGUAGE_DEFAULTS: Mapping[str, Mapping[str, int]] = {  # older files leave out what is transformers' default
    "LlamaForCausalLM": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "vocab_size": 32_000,
    }
}
MAX_IMAGE_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class LlavaVision:
    """Images of one size, cut into patches: the same number of tokens for each."""

    architecture: str
    tower: str  # a key of TOWERS
    tower_options: str  # vision_config as JSON, for transformers' config class
    image_token_id: int  # stands in a tokenized prompt where an image goes; may lie outside the vocabulary
    tokens_per_image: int
    image_size: int  # pixels, both sides
    feature_layers: tuple[int, ...]  # indices into the tower's hidden states, side by side
    drop_first: bool  # without the row of the class token
    projector_act: str
    projector_bias: bool

    @property
    def refused_token_ids(self) -> tuple[int, ...]:
        return ()

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of the tokens of any image: the model counts them through."""
        return 1, self.tokens_per_image


def llava_language(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """config.json of the language model alone, as if it stood in a directory of its own."""
    text = section(raw, "text_config", where)
    named = text.get("architectures")
    kind = text.get("model_type", "llama")
    architecture = str(named[0]) if isinstance(named, list) and named else LANGUAGE_MODELS.get(str(kind), "")
    if architecture not in LANGUAGE_MODELS.values():
        raise ModelError(
            f"{where}: a language model of type {kind!r} is not supported; supported are {', '.join(LANGUAGE_MODELS)}"
        )
    outer = {
        key: raw[key]
        for key in ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
        if raw.get(key) is not None
    }
    return {**LANGUAGE_DEFAULTS.get(architecture, {}), **outer, **text, "architectures": [architecture]}


def parse_llava(raw: Mapping[str, Any], where: str) -> LlavaVision:
    """`ModelError` says what is not supported."""
    options = section(raw, "vision_config", where)
    tower = options.get("model_type", "clip_vision_model")
    if tower not in TOWERS:
        raise ModelError(
            f"{where}: vision tower {tower!r} is not supported; supported are {', '.join(TOWERS)}"
        )
    size, patch, layers = (
        positive(options, key, f"{where}: vision_config", default) for key, default in TOWERS[tower].items()
    )
    strategy = raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelError(
            f"{where}: vision_feature_select_strategy {strategy!r} is not supported: default or full"
        )
    has_class_row = tower == "clip_vision_model"
    if strategy == "default" and not has_class_row:
        raise ModelError(
            f"{where}: {tower} has no class token for vision_feature_select_strategy default to drop; write full"
        )
    tokens = (size // patch) ** 2 + (has_class_row and strategy == "full")
    if tokens > MAX_IMAGE_TOKENS:
        raise ModelError(f"{where}: an image of {tokens} tokens is not supported; at most {MAX_IMAGE_TOKENS}")
    return LlavaVision(
        architecture=raw["architectures"][0],
        tower=tower,
        tower_options=json.dumps(options, sort_keys=True),
        image_token_id=token_id(raw, ("image_token_index", "image_token_id"), where),
        tokens_per_image=tokens,
        image_size=size,
        feature_layers=_feature_layers(raw, layers, where),
        drop_first=strategy == "default",
        projector_act=str(raw.get("projector_hidden_act", "gelu")),
        projector_bias=bool(raw.get("multimodal_projector_bias", True)),
    )


def _feature_layers(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    value = raw.get("vision_feature_layer", -2)
    chosen = value if isinstance(value, list) else [value]
    if not chosen or not all(type(each) is int and -layers - 1 <= each <= layers for each in chosen):
        raise ModelError(f"{where}: vision_feature_layer {value!r} is no layer of a tower with {layers}")
    return tuple(chosen)
