"""LLaVA on a prefill node: images of one size, made by the checkpoint's own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image

from common.checkpoint.llava_config import LlavaVision, check_llava_processor
from common.engine.models.llava import load_llava
from common.engine.models.vision_part import Pixels
from common.errors import ModelError
from prefill_node.graphs.prompt_graphs import image_graphs
from prefill_node.vision_table import Process, VisionFamily


def _process(path: Path, vision: LlavaVision) -> Process:
    """Return what makes [3, size, size] float32 by the checkpoint's preprocessor_config.json."""
    # The import takes seconds and is needed only for images. The short name requires torchvision in some versions.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    check_llava_processor(path)
    try:
        untyped: Any = AutoImageProcessor
        processor = untyped.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: cannot load its image processor: {error}") from error

    def process(image: Image.Image) -> Pixels:
        values: torch.Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return Pixels(values.float(), *vision.grid(image.width, image.height))

    size = vision.image_size
    made = process(Image.new("RGB", (size + 3, size))).values
    if made.shape != (3, size, size):
        raise ModelError(
            f"{path}: the image processor returns {list(made.shape)}, but the tower needs [3, {size}, {size}]"
        )
    return process


LLAVA = VisionFamily(load_llava, _process, image_graphs)
