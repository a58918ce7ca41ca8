"""An upper bound of the device memory that a forward of the vision part takes besides weights, from config.json only.

It counts the tensors that are alive at once at each point where they may be the most; memory inside kernels is part
of the workspace. Letters: C values of a patch inside the tower, I inside its MLP, H in the language model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from common.checkpoint.json_fields import positive
from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.qwen_vl_config import MAX_RATIO, TOWER_DEFAULTS, QwenVision
from common.checkpoint.vision_config import VisionConfig
from common.engine.encoder_sizes import ENCODER_TOKENS, aligned_width, largest_batch

# Defaults of transformers' config classes for missing keys.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "clip_vision_model": {"hidden_size": 768, "intermediate_size": 3072},
    "siglip_vision_model": {"hidden_size": 768, "intermediate_size": 3072},
    "qwen2_5_vl": {key: TOWER_DEFAULTS[key] for key in ("hidden_size", "intermediate_size", "num_heads")},
}
FLOAT = 4  # bytes, for any dtype of the model
INDEX = 8
CORNERS = 4  # learned positions that are interpolated
INDICES = 64  # bytes per patch for its indices in image and window


def encoder_bytes(vision: VisionConfig, hidden: int, dtype: torch.dtype) -> int:
    """Return the bytes that the largest batch of a node takes. `hidden` is H."""
    return OF_FAMILY[vision.family](vision, hidden, dtype.itemsize)


def _llava(vision: LlavaVision, hidden: int, size: int) -> int:
    """Return the bytes of a LLaVA tower: between layers only the states that the projector takes are kept."""
    width, inner = _dimensions(vision.tower, vision.tower_options)
    images = largest_batch(vision.tokens_per_image)
    patches = images * (vision.tokens_per_image + 1)  # including the class token
    pixels = images * 3 * vision.image_size**2 * (FLOAT + size)
    states = (len(vision.feature_layers) + 1) * width * size
    chosen = 2 * len(vision.feature_layers) * width * size  # concatenated, and again without the first row
    # Attention; MLP, whose activation makes three more tensors.
    in_layer = max(7 * width, 2 * width + 4 * inner) * size
    return pixels + patches * (states + max(in_layer, chosen + 4 * hidden * size))


def _qwen(vision: QwenVision, hidden: int, size: int) -> int:
    """Return the bytes of a Qwen tower over the patches of all images, see models/qwen_vl.py."""
    width, inner, heads = _dimensions("qwen2_5_vl", vision.tower_options)
    learned = bool(json.loads(vision.tower_options).get("learned"))
    merged = vision.merge_size**2
    patches = merged * max(ENCODER_TOKENS, largest_image(vision))
    # Per patch: bytes as received, and numbers as the tower reads them, per frame.
    values = 3 * vision.patch_size**2
    read = vision.temporal_patch_size * values
    kept = 2 * width * size + 2 * width // heads * FLOAT + values + INDICES  # inputs of a block, angles
    cut = (2 * values + 2 * read) * FLOAT + read * size
    # Normed and summed; qkv; output of attention and its copies; the product after it.
    attended = 9 * width * size
    mlp = (3 * width + 3 * aligned_width(inner)) * size
    if learned:
        # Corners and shares stay with the batch; their embeddings are added up in float32.
        kept += CORNERS * (INDEX + FLOAT)
        cut += 3 * width * FLOAT
    rows = 4 * width * size + 3 * hidden * size // merged
    return patches * (kept + max(cut, attended, mlp, rows))


def largest_image(vision: QwenVision) -> int:
    """Return the maximum tokens of one image. Each side is rounded up by less than one."""
    tokens = vision.max_pixels / (vision.patch_size * vision.merge_size) ** 2
    sides = math.sqrt(tokens / MAX_RATIO) + math.sqrt(tokens * MAX_RATIO)  # the longest image's, in tokens
    return math.ceil(tokens + sides + 1)


# VisionConfig.family -> the bytes of (vision config, H, bytes of a value)
OF_FAMILY: Mapping[str, Callable[[Any, int, int], int]] = {
    LlavaVision.family: _llava,
    QwenVision.family: _qwen,
}


def _dimensions(tower: str, options: str) -> list[int]:
    """Return the dimensions in the order of DEFAULTS. Raises ModelError."""
    raw = json.loads(options)
    return [positive(raw, key, "vision_config", default) for key, default in DEFAULTS[tower].items()]
