"""An image file to the pixels that the tower takes, as the checkpoint's image processor says. Runs on any thread."""

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
    """Pillow decodes and resizes: the same pixels on every machine, as transformers makes them."""

    def __init__(self, process: Callable[[Image.Image], Pixels], max_pixels: int) -> None:
        self._process = process
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> Pixels:
        """Raises InvalidRequest for a file that cannot be decoded, or an image that the model does not take."""
        return self._process(decode_image(data, self._max_pixels))


def load_pixel_reader(path: Path, vision: VisionConfig, max_pixels: int) -> PixelReader:
    """Raises ModelError where the image processor makes pixels that the tower does not take."""
    process = _resized(vision) if isinstance(vision, QwenVision) else _llava(path, vision)
    return PixelReader(process, max_pixels)


def _resized(vision: QwenVision) -> Callable[[Image.Image], Pixels]:
    """[height, width, 3] uint8: an eighth of what the tower reads, which the device makes of it (models/qwen_vl.py)."""

    def process(image: Image.Image) -> Pixels:
        size = vision.size(image.width, image.height)
        values = np.array(image.resize(size, Image.Resampling.BICUBIC))
        return Pixels(torch.from_numpy(values), *vision.grid(image.width, image.height))

    return process


def _llava(path: Path, vision: LlavaVision) -> Callable[[Image.Image], Pixels]:
    """[3, size, size] float32, by the processor itself. Reads preprocessor_config.json."""
    # Seconds, and nothing that text alone needs. By its module: under its short name some versions ask for torchvision.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    check_llava_processor(path)
    try:
        untyped: Any = AutoImageProcessor
        processor = untyped.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: its image processor cannot be loaded: {error}") from error

    def process(image: Image.Image) -> Pixels:
        values: torch.Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return Pixels(values.float(), *vision.grid(image.width, image.height))

    size = vision.image_size
    made = process(Image.new("RGB", (size + 3, size))).values
    if made.shape != (3, size, size):
        raise ModelError(
            f"{path}: the image processor makes {list(made.shape)} of an image, the tower takes [3, {size}, {size}]"
        )
    return process
