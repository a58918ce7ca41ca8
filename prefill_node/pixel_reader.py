"""Converts an image file to the pixels that the vision tower expects, as the checkpoint's image processor does.

It runs on any thread.
"""

from __future__ import annotations

from pathlib import Path

from common.checkpoint.vision_config import VisionConfig
from common.engine.models.vision_part import Pixels
from common.image_files import decode_image
from prefill_node.vision_table import Process, vision_family


class PixelReader:
    """Decodes and resizes with Pillow: pixels are the same on every machine, and equal those of transformers."""

    def __init__(self, process: Process, max_pixels: int) -> None:
        self._process = process
        self._max_pixels = max_pixels

    def __call__(self, data: bytes) -> Pixels:
        """Decode an image. Raises InvalidRequest for an invalid file or an image that the model does not support."""
        return self._process(decode_image(data, self._max_pixels))


def load_pixel_reader(path: Path, vision: VisionConfig, max_pixels: int) -> PixelReader:
    """Load the reader of a model.

    Raises ModelError if its image processor produces pixels that do not fit the tower.
    """
    return PixelReader(vision_family(vision.family).process(path, vision), max_pixels)
