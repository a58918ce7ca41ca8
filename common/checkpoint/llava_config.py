"""Reads the vision part of a LLaVA checkpoint's config: tower, projector, placeholders. No torch.

The engine builds the tower from `tower_options` with transformers' own classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.checkpoint import model_files
from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    architecture_of,
    flag,
    is_finite,
    number,
    optional_section,
    positive,
    section,
    shown,
    token_id,
    word,
)
from common.checkpoint.vision_tower import TowerNames, TowerSize
from common.errors import ModelError

ARCHITECTURES = ("LlavaForConditionalGeneration",)
_TRANSFORMER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
# model_type -> the sizes from which a tower is built, with the defaults of keys that config.json may leave out.
TOWERS: Mapping[str, Mapping[str, int]] = {
    "clip_vision_model": {**_TRANSFORMER, "patch_size": 32},
    "siglip_vision_model": {**_TRANSFORMER, "patch_size": 16},
}
TOWER_ACTIVATIONS: Mapping[str, str] = {
    "clip_vision_model": "quick_gelu",
    "siglip_vision_model": "gelu_pytorch_tanh",
}
TOWER_EPS: Mapping[str, float] = {"clip_vision_model": 1e-5, "siglip_vision_model": 1e-6}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "tanh")
MAX_IMAGE_SIZE = 4096  # pixels, both sides
MAX_SIZES = {
    "hidden_size": MAX_WIDTH,
    "intermediate_size": MAX_WIDTH,
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "image_size": MAX_IMAGE_SIZE,
    "patch_size": MAX_IMAGE_SIZE,
}
LANGUAGE_MODELS = {  # model_type of text_config -> its architecture
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = {"intermediate_size": 11_008, "max_position_embeddings": 2048, "vocab_size": 32_000}
_MISTRAL = {"intermediate_size": 14_336, "max_position_embeddings": 131_072, "vocab_size": 32_000}
_QWEN = {"intermediate_size": 22_016, "max_position_embeddings": 32_768, "vocab_size": 151_936}
LANGUAGE_DEFAULTS: Mapping[str, Mapping[str, int]] = {  # older files leave out transformers' defaults
    "LlamaForCausalLM": {**_SIZES, **_LLAMA},
    "MistralForCausalLM": {**_SIZES, **_MISTRAL, "num_key_value_heads": 8},
    "Qwen2ForCausalLM": {**_SIZES, **_QWEN, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": {**_SIZES, **_QWEN, "num_key_value_heads": 32},
}
MAX_IMAGE_TOKENS = 65_536
PROCESSORS = ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor")


@dataclass(frozen=True, slots=True)
class LlavaVision:
    """A `VisionConfig` for images of one size, cut into patches: the same number of tokens for each image."""

    family: ClassVar[str] = "llava"
    names: ClassVar[TowerNames] = TowerNames(
        "LLaVA",
        "language_model.model.",
        "language_model.model.",
        "language_model.",
        ("vision_tower.", "multi_modal_projector."),
    )

    architecture: str
    tower: str  # a key of TOWERS
    # The parts of vision_config that define the tower, as JSON for transformers' config class.
    tower_options: str
    image_token_id: int  # placeholder of an image in a tokenized prompt; may be outside the vocabulary
    tokens_per_image: int
    image_size: int  # pixels, both sides
    feature_layers: tuple[int, ...]  # indices into the tower's hidden states, which are concatenated
    drop_first: bool  # drop the row of the class token
    projector_act: str
    projector_bias: bool

    @property
    def refused_token_ids(self) -> tuple[int, ...]:
        return ()

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of the tokens of any image: one row, since the model numbers them consecutively."""
        return 1, self.tokens_per_image

    def tower_size(self, hidden: int) -> TowerSize:
        """Return the size up to the last feature layer: layers past it are not built."""
        options = json.loads(self.tower_options)
        width, inner, count = (
            options[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        features = self.feature_layers
        layers = max(each if each >= 0 else count + 1 + each for each in features)
        values = layers * (4 * width + 2 * inner) * width + len(features) * width * hidden + hidden * hidden
        return TowerSize(values, width, inner, layers)


def llava_language(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config.json of the language model, as it would be in a directory of its own."""
    text = section(raw, "text_config", where)
    kind = word(text, "model_type", f"{where}: text_config", "llama")
    architecture = architecture_of(text) or LANGUAGE_MODELS.get(kind, "")
    if architecture not in LANGUAGE_MODELS.values():
        raise ModelError(
            f"{where}: text_config: a language model of type {shown(kind)} is not supported; "
            f"supported are {', '.join(LANGUAGE_MODELS)}"
        )
    outer = {
        key: raw[key]
        for key in ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
        if raw.get(key) is not None
    }
    # Either config may tie the head, as in transformers.
    tied = any(flag(part, "tie_word_embeddings", where) for part in (raw, text))
    own = {"architectures": [architecture], "tie_word_embeddings": tied}
    return {**LANGUAGE_DEFAULTS.get(architecture, {}), **outer, **text, **own}


def parse_llava(raw: Mapping[str, Any], where: str) -> LlavaVision:
    """Return the vision config. Raises ModelError with what is not supported."""
    options = section(raw, "vision_config", where)
    named = f"{where}: vision_config"
    tower = word(options, "model_type", named, "clip_vision_model")
    if tower not in TOWERS:
        raise ModelError(
            f"{where}: vision tower {shown(tower)} is not supported; supported are {', '.join(TOWERS)}"
        )
    sizes = {
        key: positive(options, key, named, default, MAX_SIZES[key]) for key, default in TOWERS[tower].items()
    }
    channels = positive(options, "num_channels", named, 3)
    if channels != 3:
        raise ModelError(f"{named}: num_channels {channels} is not supported, images have 3")
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ModelError(
            f"{named}: hidden_size {sizes['hidden_size']} is not a multiple of num_attention_heads "
            f"{sizes['num_attention_heads']}"
        )
    shape = {
        **sizes,
        "hidden_act": _activation(options, "hidden_act", named, TOWER_ACTIVATIONS[tower]),
        "layer_norm_eps": number(options, "layer_norm_eps", named, TOWER_EPS[tower], 1.0),
    }
    size, patch, layers = sizes["image_size"], sizes["patch_size"], sizes["num_hidden_layers"]
    if patch > size:
        raise ModelError(f"{named}: patch_size {patch} is more than image_size {size}")
    strategy = raw.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelError(
            f"{where}: vision_feature_select_strategy {shown(strategy)} is not supported: default or full"
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
        architecture=str(architecture_of(raw)),
        tower=tower,
        tower_options=json.dumps(shape, sort_keys=True),
        image_token_id=token_id(raw, ("image_token_index", "image_token_id"), where),
        tokens_per_image=tokens,
        image_size=size,
        feature_layers=_feature_layers(raw, layers, where),
        drop_first=strategy == "default",
        projector_act=_activation(raw, "projector_hidden_act", where, "gelu"),
        projector_bias=flag(raw, "multimodal_projector_bias", where, True),
    )


def check_llava_processor(directory: Path) -> None:
    """Raise ModelError if the image processor would make absurdly large pixels, or belongs to another family.

    transformers builds it from preprocessor_config.json, or from a part of processor_config.json.
    """
    file, outer = directory / "preprocessor_config.json", directory / "processor_config.json"
    if file.is_file():
        _check_processor(model_files.read_json(file), str(file))
    if outer.is_file():
        _check_processor(
            optional_section(model_files.read_json(outer), "image_processor", str(outer)), str(outer)
        )


def _check_processor(values: Mapping[str, Any], where: str) -> None:
    kind = word(values, "image_processor_type", where, PROCESSORS[0])
    if kind.removesuffix("Fast").removesuffix("Pil") not in PROCESSORS:
        raise ModelError(
            f"{where}: image_processor_type {shown(kind)} is not supported; supported are {', '.join(PROCESSORS)}"
        )
    for key in ("size", "crop_size"):
        size = values.get(key)
        edges = size if isinstance(size, dict) else {key: size}
        for edge, value in edges.items():
            positive({edge: value}, edge, f"{where}: {key}", 1, MAX_IMAGE_SIZE)
    number(values, "rescale_factor", where, 1 / 255, 1.0)
    for key in ("image_mean", "image_std"):
        given = values.get(key)
        if given is not None and not (
            isinstance(given, list) and len(given) == 3 and all(map(is_finite, given))
        ):
            raise ModelError(f"{where}: {key} must be 3 numbers, found {shown(given)}")


def _activation(raw: Mapping[str, Any], key: str, where: str, default: str) -> str:
    name = word(raw, key, where, default)
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{where}: {key} {shown(name)} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return name


def _feature_layers(raw: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    value = raw.get("vision_feature_layer", -2)
    chosen = value if isinstance(value, list) else [value]
    known = range(-layers - 1, layers + 1)
    if not 0 < len(chosen) <= layers + 1 or not all(type(each) is int and each in known for each in chosen):
        raise ModelError(
            f"{where}: vision_feature_layer {shown(value)} is not a layer of a tower with {layers}"
        )
    return tuple(chosen)
