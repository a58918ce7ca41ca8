"""The vision part of a model of any family, read from config.json. No torch.

The router derives from it the layout and the placeholder of an image's tokens in the prompt; the engine builds its
tower from it. Qwen3.5 is also served without its vision part: from a directory without an image processor, or without
a vision_config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoint import llava_config, qwen_3_5_config, qwen_vl_config
from common.checkpoint.json_fields import Raw, architecture_of
from common.checkpoint.vision_tower import VisionConfig

__all__ = ["ARCHITECTURES", "VisionConfig", "is_vision", "language_part", "parse_vision"]

# Architectures that are served only with their vision part.
ARCHITECTURES = (*llava_config.ARCHITECTURES, *qwen_vl_config.ARCHITECTURES)


def is_vision(raw: Raw, directory: Path) -> bool:
    """Return whether the model in `directory`, whose config.json is `raw`, takes images."""
    return architecture_of(raw) in ARCHITECTURES or qwen_3_5_config.takes_images(raw, directory)


def language_part(raw: Raw, where: str) -> tuple[dict[str, Any], tuple[int, ...], bool]:
    """Return the config.json of the language model as a directory of its own would have it, its rotary sections, and
    whether they are interleaved.
    """
    if architecture_of(raw) in llava_config.ARCHITECTURES:
        return llava_config.llava_language(raw, where), (), False
    if architecture_of(raw) in qwen_3_5_config.ARCHITECTURES:
        return *qwen_3_5_config.language(raw, where), True
    return *qwen_vl_config.qwen_language(raw, where), False


def parse_vision(raw: Raw, directory: Path) -> VisionConfig:
    """Return the vision config. Raises ModelError with what is not supported."""
    if architecture_of(raw) in llava_config.ARCHITECTURES:
        return llava_config.parse_llava(raw, str(directory / "config.json"))
    if architecture_of(raw) in qwen_3_5_config.ARCHITECTURES:
        return qwen_3_5_config.parse(raw, directory)
    return qwen_vl_config.parse_qwen(raw, directory)
