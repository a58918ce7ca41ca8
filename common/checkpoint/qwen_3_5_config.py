"""Reads the vision part of a Qwen3.5 checkpoint's config: Qwen3-VL's tower, without deep stacking. No torch.

Images are resized and cut into patches as for Qwen2.5-VL (`qwen_vl_config.py`). A directory without an image processor
serves text only, as do copies without the vision part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.checkpoint.json_fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    architecture_of,
    number,
    optional_section,
    positive,
    shown,
    word,
)
from common.checkpoint.qwen_vl_config import (
    PROCESSOR_FILES,
    QwenVision,
    TowerFields,
    read_vision,
)
from common.checkpoint.rope_config import INTERLEAVED, SECTIONS, is_interleaved, split_sections
from common.checkpoint.text_part import flat_text
from common.errors import ModelError

# Architecture -> the architecture of its language model where that is published by itself.
ARCHITECTURES: Mapping[str, str] = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
# Keys that define the tower, with transformers' defaults.
TOWER: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "rope_parameters": None,
}
MAX_SIDE = 1024  # learned positions along a side of an image
AXIAL = ("axial", "default", None)
DEEP = "deepstack_visual_indexes"


def takes_images(raw: Mapping[str, Any], directory: Path) -> bool:
    """Return whether config.json has a vision part and `directory` the image processor for it."""
    if architecture_of(raw) not in ARCHITECTURES or raw.get("vision_config") is None:
        return False
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def language(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the config.json of the language model, and its rotary sections. Raises ModelError."""
    flat = flat_text(raw, where)
    if not is_interleaved(flat, where, default=True):
        raise ModelError(f"{where}: {INTERLEAVED} false is not supported: this family interleaves its axes")
    found, sections = split_sections(flat, where, interleaved=True)
    if not sections:
        raise ModelError(f"{where}: the rope parameters of this model need {SECTIONS}")
    return {**found, "architectures": [ARCHITECTURES[str(architecture_of(raw))]]}, sections


def parse(raw: Mapping[str, Any], directory: Path) -> QwenVision:
    """Return the vision config. Raises ModelError with what is not supported."""
    return read_vision(raw, directory, TowerFields(patch_size=16, options=_tower))


def _tower(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return all keys of TOWER, checked."""
    found = {key: default if options.get(key) is None else options[key] for key, default in TOWER.items()}
    for key, most in (
        ("depth", MAX_LAYERS),
        ("hidden_size", MAX_WIDTH),
        ("intermediate_size", MAX_WIDTH),
        ("num_heads", MAX_HEADS),
        ("num_position_embeddings", MAX_SIDE**2),
    ):
        positive(found, key, where, most=most)
    if word(found, "hidden_act", where, "") != "gelu_pytorch_tanh":
        raise ModelError(
            f"{where}: hidden_act {shown(found['hidden_act'])} is not supported, only gelu_pytorch_tanh"
        )
    if options.get(DEEP):
        raise ModelError(f"{where}: {DEEP} {shown(options[DEEP])} is not supported, only an empty list")
    if math.isqrt(found["num_position_embeddings"]) ** 2 != found["num_position_embeddings"]:
        raise ModelError(
            f"{where}: num_position_embeddings {found['num_position_embeddings']} is not the square of a side"
        )
    rope = optional_section(found, "rope_parameters", where)
    if rope.get("rope_type") not in AXIAL:
        raise ModelError(f"{where}: rope type {shown(rope['rope_type'])} is not supported, only axial")
    theta = number(rope, "rope_theta", f"{where}: rope_parameters", 10_000.0)
    return {**found, "rope_parameters": {"rope_theta": theta}, "learned": True}
