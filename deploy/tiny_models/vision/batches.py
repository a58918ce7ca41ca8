"""Random batches of examples. The whole training set is kept on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from deploy.tiny_models.vision.checkpoint import MEAN, STD
from deploy.tiny_models.vision.examples import Examples


class Batch(NamedTuple):
    """A batch. Rows without pictures come first, then those with one, then those with two."""

    ids: Tensor  # [rows, tokens] int64
    weights: Tensor  # [rows, tokens] float32
    pixels: Tensor  # [pictures, 3, SIDE, SIDE] float32, in the order of their placeholders


def normalized(pixels: Tensor) -> Tensor:
    """[..., SIDE, SIDE, 3] 0 .. 255 -> [..., 3, SIDE, SIDE], as CLIP's processor converts a picture of this size."""
    mean, std = (torch.tensor(each, device=pixels.device) for each in (MEAN, STD))
    return ((pixels.float() / 255 - mean) / std).movedim(-1, -3)


class Sampler:
    """Draws rows with replacement; every batch has the same number of rows of each kind."""

    def __init__(self, examples: Examples, rows: int, device: torch.device, seed: int) -> None:
        self._ids = torch.from_numpy(examples.ids.astype("int32")).to(device)
        self._weights = torch.from_numpy(examples.weights).to(device)
        self._first = torch.from_numpy(examples.first_image).to(device)
        self._images = torch.from_numpy(examples.images).to(device)
        counts = torch.from_numpy(examples.num_images).to(device)
        self._rows = [(counts == number).nonzero().flatten() for number in range(3)]
        none, two = max(1, rows // 12), max(1, rows * 2 // 9)
        self._sizes = (none, rows - none - two, two)
        self._generator = torch.Generator(device).manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._draw()

    def _draw(self) -> Batch:
        chosen = [
            rows[torch.randint(len(rows), (size,), generator=self._generator, device=rows.device)]
            for rows, size in zip(self._rows, self._sizes, strict=True)
        ]
        rows = torch.cat(chosen)
        one, two = self._first[chosen[1]], self._first[chosen[2]]
        pictures = torch.cat((one, torch.stack((two, two + 1), dim=1).flatten()))
        return Batch(self._ids[rows].long(), self._weights[rows].float(), normalized(self._images[pictures]))


def merged_embeddings(model: LlavaForConditionalGeneration, ids: Tensor, pixels: Tensor) -> Tensor:
    """[rows, tokens, hidden]: the embeddings of the ids, with those of the pictures at their placeholders."""
    inner: Any = model.model
    config = model.config
    tower = inner.vision_tower(pixels, output_hidden_states=True)
    features = inner.multi_modal_projector(tower.hidden_states[config.vision_feature_layer][:, 1:])
    embeds: Tensor = inner.language_model.embed_tokens(ids)
    here = (ids == config.image_token_index).unsqueeze(-1)
    return embeds.masked_scatter(here, features.to(embeds.dtype))
