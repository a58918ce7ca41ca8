"""An image file to the pixels that the tower takes, with the checkpoint's own image processor. Runs on any thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from common.errors import ModelError
from common.image_files import decode_image
from common.vision_config import VisionConfig


class PixelReader:
    """Pillow decodes and resizes: the same pixels on every machine, as transformers makes them."""

    def __init__(self, process: Callable[[Image.Image], Tensor], max_pixels: int) -> None:
        self._process = process
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> Tensor:
        """[3, size, size] float32. Raises InvalidRequest for a file that cannot be decoded."""
        return self._process(decode_image(data, self._max_pixels))


def load_pixel_reader(path: Path, vision: VisionConfig, max_pixels: int) -> PixelReader:
    """Reads preprocessor_config.json. Raises ModelError where it makes pixels that the tower does not take."""
    from transformers import AutoImageProcessor  # seconds, and nothing that text alone needs

    try:
        untyped: Any = AutoImageProcessor
        processor = untyped.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{path}: its image processor cannot be loaded: {error}") from error

    def process(image: Image.Image) -> Tensor:
        pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels.float()

    size = vision.image_size
    made = process(Image.new("RGB", (size + 3, size)))
    if made.shape != (3, size, size):
        raise ModelError(
            f"{path}: the image processor makes {list(made.shape)} of an image, the tower takes [3, {size}, {size}]"
        )
    return PixelReader(process, max_pixels)
