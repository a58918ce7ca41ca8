"""Qwen's vision parts on a prefill node: images of any size, which the host resizes and the device normalises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from common.checkpoint.qwen_vl_config import QwenVision
from common.engine.models.qwen_vl import load_qwen
from common.engine.models.vision_part import Pixels
from prefill_node.graphs.prompt_graphs import patch_graphs
from prefill_node.vision_table import Process, VisionFamily


def _process(path: Path, vision: QwenVision) -> Process:
    """Return what makes [height, width, 3] uint8: an eighth of the tower's input, which the device computes from it."""

    def process(image: Image.Image) -> Pixels:
        size = vision.size(image.width, image.height)
        values = np.array(image.resize(size, Image.Resampling.BICUBIC))
        return Pixels(torch.from_numpy(values), *vision.grid(image.width, image.height))

    return process


QWEN = VisionFamily(load_qwen, _process, patch_graphs)
