"""LLaVA's vision part: a tower (CLIP or SigLIP) and the projector into the language model's width.

Of the tower only the layers up to the deepest feature layer are built and run. The language model is one of
`registry.BUILDERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from common.engine.checkpoint_layout import CheckpointLayout, checkpoint_layout
from common.engine.layers.placement import Placement
from common.engine.models.clip_tower import ClipTower, TowerShape, activation
from common.engine.models.vision_part import Pixels
from common.engine.weights import load_weights
from common.llava_config import LlavaVision
from common.model_config import ModelConfig
from common.model_files import read_weight_files

UNUSED = ("embeddings.position_ids",)  # a constant that older files hold
LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
BEHIND = ("post_layernorm.", "head.")


class Projector(nn.Module):
    """Two linear layers; attribute names are tensor names."""

    def __init__(self, width: int, hidden: int, vision: LlavaVision) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width * len(vision.feature_layers), hidden, bias=vision.projector_bias)
        self.act = activation(vision.projector_act)
        self.linear_2 = nn.Linear(hidden, hidden, bias=vision.projector_bias)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.linear_2(self.act(self.linear_1(features)))
        return projected


class LlavaPart(nn.Module):
    """A `VisionPart` for pixels [3, image_size, image_size] float32. All images have one size: graphs can hold it."""

    def __init__(self, vision: LlavaVision, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.config = vision
        self.hidden = hidden
        self.placement = placement
        shape = TowerShape.of(vision.tower, json.loads(vision.tower_options))
        states = range(shape.layers + 1)
        self._features = tuple(states[layer] for layer in vision.feature_layers)  # layers before each
        self.tower = ClipTower(shape, max(self._features), placement)
        with torch.device(placement.device):
            self.projector = Projector(shape.width, hidden, vision)
        self.to(placement.dtype)

    def forward(self, images: Sequence[Pixels]) -> list[Tensor]:
        """[1, tokens_per_image, hidden] each."""
        return list(self.encode(self.pixels(images))[:, None])

    @torch.inference_mode()
    def pixels(self, images: Sequence[Pixels]) -> Tensor:
        """[I, 3, image_size, image_size] on the device, in the model's dtype."""
        device, dtype = self.placement.device, self.placement.dtype
        shape = (len(images), *images[0].values.shape)
        gathered = torch.empty(shape, pin_memory=device.type == "cuda")
        torch.stack([image.values for image in images], out=gathered)
        return gathered.to(device, non_blocking=True).to(dtype)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """What `pixels` returns -> [I, tokens_per_image, hidden]."""
        states = self.tower(pixels, frozenset(self._features))
        chosen = torch.cat([states[depth] for depth in self._features], dim=-1)
        rows: Tensor = self.projector(chosen[:, 1:] if self.config.drop_first else chosen)
        return rows

    def examples(self) -> Sequence[Sequence[Pixels]]:
        size = self.config.image_size
        return [[Pixels(torch.zeros(3, size, size), *self.config.grid(size, size))]]


def load_llava(path: str | Path, config: ModelConfig, placement: Placement) -> LlavaPart:
    """Build the vision part and fill it. `ModelError` says what does not fit."""
    assert isinstance(config.vision, LlavaVision)
    part = LlavaPart(config.vision, config.hidden_size, placement).eval()
    layout = checkpoint_layout(config, path)
    names = _by_module_name(Path(path), layout)
    load_weights(
        path,
        _checkpoint_tensors(part, names, layout),
        ignore=(*UNUSED, *_behind_the_features(part, names)),
        aside=layout.language_prefixes,
    )
    return part


def _by_module_name(path: Path, layout: CheckpointLayout) -> Mapping[str, str]:
    """Name within the tower -> name in the checkpoint, with or without a level `vision_model`."""
    tower, _ = layout.vision_prefixes
    return {
        name.removeprefix(tower).removeprefix("vision_model."): name
        for file in read_weight_files(path)
        for name in file.tensors
        if name.startswith(tower)
    }


def _behind_the_features(part: LlavaPart, names: Mapping[str, str]) -> Iterator[str]:
    """Names in the checkpoint of what no feature depends on: later layers, the norm and the head behind all."""
    for within, name in names.items():
        layer = LAYER.match(within)
        if within.startswith(BEHIND) or (layer and int(layer[1]) >= len(part.tower.layers)):
            yield name


def _checkpoint_tensors(
    part: LlavaPart, names: Mapping[str, str], layout: CheckpointLayout
) -> Iterator[tuple[str, Tensor]]:
    tower, projector = layout.vision_prefixes
    for name, tensor in part.tower.checkpoint_tensors():
        yield names.get(name, f"{tower}{name}"), tensor
    for name, tensor in part.projector.named_parameters():
        yield f"{projector}{name}", tensor.data
