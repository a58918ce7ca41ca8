"""LLaVA's vision part: a tower of transformers (CLIP or SigLIP) and the projector into the language model's width.

The language model is one of `registry.BUILDERS`. transformers is imported where a tower is built: nodes that serve text
alone start seconds sooner without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.engine.checkpoint_layout import PROJECTOR, TOWER, CheckpointLayout, checkpoint_layout
from common.engine.layers.placement import Placement
from common.engine.weights import load_weights
from common.errors import ModelError
from common.model_config import ModelConfig
from common.model_files import read_weight_files
from common.vision_config import VisionConfig

UNUSED = ("embeddings.position_ids",)  # a constant that older files hold


class Projector(nn.Module):
    """Two linear layers; attribute names are tensor names."""

    def __init__(self, width: int, hidden: int, vision: VisionConfig) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        if vision.projector_act not in ACT2FN:
            raise ModelError(
                f"projector_hidden_act {vision.projector_act!r} is not one of transformers' activations"
            )
        self.linear_1 = nn.Linear(width * len(vision.feature_layers), hidden, bias=vision.projector_bias)
        self.act = ACT2FN[vision.projector_act]
        self.linear_2 = nn.Linear(hidden, hidden, bias=vision.projector_bias)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(self.act(self.linear_1(features)))
        return projected


class VisionPart(nn.Module):
    """Pixels of N images -> rows in the place of their placeholders' embeddings."""

    def __init__(self, vision: VisionConfig, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.config = vision
        self.hidden = hidden
        self.placement = placement
        with torch.device(placement.device):
            self.tower = _tower(vision)
            self.projector = Projector(self.tower.config.hidden_size, hidden, vision)
        self.to(placement.dtype)

    @torch.inference_mode()
    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, image_size, image_size] float32 on any device -> [N, tokens_per_image, hidden]."""
        placement = self.placement
        pinned = pixels.pin_memory() if placement.device.type == "cuda" and not pixels.is_cuda else pixels
        given = pinned.to(placement.device, non_blocking=True).to(placement.dtype)
        states = self.tower(given, output_hidden_states=True).hidden_states
        chosen = torch.cat([states[layer] for layer in self.config.feature_layers], dim=-1)
        rows: Tensor = self.projector(chosen[:, 1:] if self.config.drop_first else chosen)
        return rows


def load_vision(path: str | Path, config: ModelConfig, placement: Placement) -> VisionPart:
    """Build the vision part and fill it. `ModelError` says what does not fit."""
    assert config.vision is not None
    part = VisionPart(config.vision, config.hidden_size, placement).eval()
    layout = checkpoint_layout(config, path)
    names = _by_module_name(Path(path), layout)
    load_weights(
        path, _checkpoint_tensors(part, names, layout), ignore=UNUSED, aside=layout.language_prefixes
    )
    return part


def _tower(vision: VisionConfig) -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

    options = {key: value for key, value in json.loads(vision.tower_options).items() if key != "model_type"}
    if vision.tower == "clip_vision_model":
        return CLIPVisionModel(CLIPVisionConfig(**options))
    return SiglipVisionModel(SiglipVisionConfig(**options))


def _by_module_name(path: Path, layout: CheckpointLayout) -> Mapping[str, str]:
    """Name within the tower -> name in the checkpoint. Versions of transformers differ in a level `vision_model`."""
    tower = layout.vision + TOWER
    return {
        name.removeprefix(tower).removeprefix("vision_model."): name
        for file in read_weight_files(path)
        for name in file.tensors
        if name.startswith(tower)
    }


def _checkpoint_tensors(
    part: VisionPart, names: Mapping[str, str], layout: CheckpointLayout
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in part.tower.named_parameters():
        within = name.removeprefix("vision_model.")
        yield names.get(within, f"{layout.vision}{TOWER}{within}"), tensor.data
    for name, tensor in part.projector.named_parameters():
        yield f"{layout.vision}{PROJECTOR}{name}", tensor.data
