"""LLaVA's vision part: a tower of transformers (CLIP or SigLIP) and the projector to the language model's width.

Only the tower's layers up to the deepest feature layer are built and run. The language model is one of `FAMILIES`
(common/checkpoint/model_config.py). transformers is imported when a tower is built: without it, nodes that serve text
start seconds sooner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.llava_config import LlavaVision
from common.checkpoint.model_config import ModelConfig
from common.checkpoint.model_files import read_tensors
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement
from common.engine.models.checkpoint_layout import CheckpointLayout, checkpoint_layout
from common.engine.models.model_size import check_tower_size
from common.engine.models.vision_part import Pixels
from common.engine.weights import load_weights
from common.errors import ModelError

UNUSED = ("embeddings.position_ids",)  # a constant that older files contain
LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
UNREAD = ("post_layernorm.", "head.")


class Projector(nn.Module):
    """Two linear layers; attribute names equal tensor names."""

    def __init__(self, width: int, hidden: int, vision: LlavaVision) -> None:
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


class LlavaPart(nn.Module):
    """A `VisionPart` for pixels [3, image_size, image_size] float32.

    All images have one size, so graphs can capture it.
    """

    def __init__(self, vision: LlavaVision, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.config = vision
        self.placement = placement
        with torch.device(placement.device):
            self.tower, self._features = _tower(vision)
            self.projector = Projector(self.tower.config.hidden_size, hidden, vision)
        self.to(placement.dtype)

    @property
    def runs_on_device(self) -> bool:
        """True: `encode` needs no batch data from the host."""
        return True

    def forward(self, images: Sequence[Pixels]) -> list[Tensor]:
        """Return [1, tokens_per_image, hidden] per image."""
        return list(self.encode(self.pixels(images))[:, None])

    @torch.inference_mode()
    def pixels(self, images: Sequence[Pixels]) -> Tensor:
        """Return [I, 3, image_size, image_size] on the device, in the model's dtype."""
        device, dtype = self.placement.device, self.placement.dtype
        shape = (len(images), *images[0].values.shape)
        gathered = torch.empty(shape, pin_memory=device.type == "cuda")
        torch.stack([image.values for image in images], out=gathered)
        return gathered.to(device, non_blocking=True).to(dtype)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Return [I, tokens_per_image, hidden] for the result of `pixels`."""
        tower = self.tower
        state: Tensor = tower.embeddings(pixels)
        if hasattr(tower, "pre_layrnorm"):  # CLIP has it, misspelled as in its checkpoints
            state = tower.pre_layrnorm(state)
        states = {}
        for depth in range(1 + len(tower.encoder.layers)):
            if depth:
                state = tower.encoder.layers[depth - 1](state, None)
            if depth in self._features:
                states[depth] = state
        chosen = torch.cat([states[depth] for depth in self._features], dim=-1)
        rows: Tensor = self.projector(chosen[:, 1:] if self.config.drop_first else chosen)
        return rows

    def examples(self) -> Sequence[Sequence[Pixels]]:
        size = self.config.image_size
        return [[Pixels(torch.zeros(3, size, size), *self.config.grid(size, size))]]


def load_llava(path: str | Path, config: ModelConfig, placement: Placement) -> LlavaPart:
    """Build and fill the vision part. Raises ModelError with what does not fit."""
    assert isinstance(config.vision, LlavaVision)
    check_tower_size(Path(path), config.vision, config.hidden_size)
    part = LlavaPart(config.vision, config.hidden_size, placement).eval()
    layout = checkpoint_layout(config, path)
    names = _by_module_name(Path(path), layout)
    load_weights(
        path,
        _pieces(part, names, layout),
        ignore=(*UNUSED, *_unread_tensors(part, names)),
        aside=layout.language_prefixes,
    )
    return part


def _tower(vision: LlavaVision) -> tuple[Any, tuple[int, ...]]:
    """Return the part of the tower that is used, and the layers before each state that the projector takes."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel

    options = {key: value for key, value in json.loads(vision.tower_options).items() if key != "model_type"}
    kinds: tuple[Any, Any] = CLIPVisionConfig, CLIPVisionModel
    if vision.tower != "clip_vision_model":
        kinds, options["vision_use_head"] = (SiglipVisionConfig, SiglipVisionModel), False
    config = kinds[0](**options)
    states = range(config.num_hidden_layers + 1)
    features = tuple(states[layer] for layer in vision.feature_layers)
    config.num_hidden_layers = max(features)
    model = kinds[1](config)
    tower: Any = getattr(model, "vision_model", model)  # some versions of transformers have this level
    del tower.post_layernorm
    return tower, features


def _by_module_name(path: Path, layout: CheckpointLayout) -> Mapping[str, str]:
    """Map names within the tower to names in the checkpoint, with or without a level `vision_model`."""
    tower, _ = layout.vision_prefixes
    return {
        name.removeprefix(tower).removeprefix("vision_model."): name
        for name in read_tensors(path)
        if name.startswith(tower)
    }


def _unread_tensors(part: LlavaPart, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the checkpoint names on which no feature depends: later layers, and the norm and head after them."""
    for within, name in names.items():
        layer = LAYER.match(within)
        if within.startswith(UNREAD) or (layer and int(layer[1]) >= part.tower.config.num_hidden_layers):
            yield name


def _pieces(part: LlavaPart, names: Mapping[str, str], layout: CheckpointLayout) -> Iterator[Piece]:
    tower, projector = layout.vision_prefixes
    for name, tensor in part.tower.named_parameters():
        yield Piece.all_of(names.get(name, f"{tower}{name}"), tensor.data)
    for name, tensor in part.projector.named_parameters():
        yield Piece.all_of(f"{projector}{name}", tensor.data)
