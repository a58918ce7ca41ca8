"""The table of vision families, with the parts that a prefill node runs for each.

To add one, write its config with a row in `parse_vision` (common/checkpoint/vision_config.py), its part in
common/engine/models/, its memory with a row in common/node/encoder_memory.py, and a record here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from common.checkpoint.model_config import ModelConfig
from common.engine.graphs.backends.base import Backend
from common.engine.graphs.node_graphs import GraphForward
from common.engine.layers.placement import Placement
from common.engine.models.vision_part import LoadedVisionPart, Pixels, VisionPart
from common.named import named

Process = Callable[[Image.Image], Pixels]


class EncoderForward(VisionPart, GraphForward, Protocol):
    """A vision part that replays graphs for the batches that fit."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The record of one family; its functions take configs and parts of that family only."""

    # Loads the part of the model in a directory. Raises ModelError with what does not fit.
    load: Callable[[Path, ModelConfig, Placement], LoadedVisionPart]
    # (directory, vision config) -> what converts a decoded image. Raises ModelError for pixels that the tower cannot
    # take.
    process: Callable[[Path, Any], Process]
    # (part, backend, captured, poisoned) -> its forward with graphs, not captured yet; without shapes if not `captured`
    graphs: Callable[[Any, Backend, bool, bool], EncoderForward]


# VisionConfig.family -> "module:attribute" of its record
VISION_FAMILIES = {
    "llava": "prefill_node.llava_images:LLAVA",
    "qwen": "prefill_node.qwen_images:QWEN",
}


def vision_family(name: str) -> VisionFamily:
    record = named(VISION_FAMILIES[name])
    assert isinstance(record, VisionFamily)
    return record
