"""Converts an image file to the pixels that the vision tower expects, as the checkpoint's image processor does.

It runs on any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.checkpoint.llava_config import LlavaVision, check_llava_processor
from common.checkpoint.qwen_vl_config import QwenVision
from common.checkpoint.vision_config import VisionConfig
from common.engine.models.vision_part import Pixels
from common.errors import ModelError
from common.image_files import decode_image


class PixelReader:
    """Decodes and resizes with Pillow: pixels are the same on every machine, and equal those of transformers."""

    def __init__(self, process: Callable[[Image.Image], Pixels], max_pixels: int) -> None:
        self._process = process
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> Pixels:
        """Decode an image. Raises InvalidRequest for an invalid file or an image that the model does not support."""
        return self._process(decode_image(data, self._max_pixels))


def load_pixel_reader(path: Path, vision: VisionConfig, max_pixels: int) -> PixelReader:
    """Load the reader of a model.

    Raises ModelError if its image processor produces pixels that do not fit the tower.
    """
    process = _resized(vision) if isinstance(vision, QwenVision) else _llava(path, vision)
    return PixelReader(process, max_pixels)


def _resized(vision: QwenVision) -> Callable[[Image.Image], Pixels]:
    """Read [height, width, 3] uint8: an eighth of the tower's input, which the device computes from it (qwen_vl.py)."""

    def process(image: Image.Image) -> Pixels:
        size = vision.size(image.width, image.height)
        values = np.array(image.resize(size, Image.Resampling.BICUBIC))
        return Pixels(torch.from_numpy(values), *vision.grid(image.width, image.height))

    return process


def _llava(path: Path, vision: LlavaVision) -> Callable[[Image.Image], Pixels]:
    """Read [3, size, size] float32 with the checkpoint's own processor, from preprocessor_config.json."""
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
