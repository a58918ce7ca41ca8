"""Qwen2.5-VL's vision part: a tower over patches of images of any size, most of whose layers attend within windows.

Modules and weights are those of transformers' class. Its forward is not used: it asks the device for lengths that the
host knows, and attends window by window. Here all windows of a batch are one product, in patches sorted by window; the
positions of patches, windows and their way back are computed on the host from the sizes of the images.
Source: arXiv 2502.13923, 2.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.engine.checkpoint_layout import checkpoint_layout
from common.engine.host_copies import send
from common.engine.layers.placement import Placement
from common.engine.models.vision_part import Pixels
from common.engine.weights import load_weights
from common.errors import ModelError
from common.model_config import ModelConfig
from common.qwen_vl_config import QwenVision

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
# Not cuDNN, which plans anew for every shape: images of new sizes would wait for it, and its plans are kept for ever.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PatchOrder:
    """N patches of a batch, sorted by window, `merge` squared neighbours together. As the processor gives them first.

    Windows are padded to the P patches of the largest.
    """

    places: Ints  # [N, 2] row and column in its image, sorted
    merged: Ints  # [N / merge ** 2] the groups of patches that the processor gives, sorted
    back: Ints  # [N / merge ** 2] the opposite
    lengths: Ints  # [W] patches of each window
    padded: Ints  # [W, P] patches, sorted; behind a window's end its first one
    unpadded: Ints  # [N] where each patch stands among W * P

    @classmethod
    def of(cls, grids: Sequence[tuple[int, int]], merge: int, window: int) -> PatchOrder:
        """Of images with so many (rows, columns) of groups, in windows of `window` by `window` groups."""
        owners, rows, columns = [], [], []
        first = 0
        for height, width in grids:
            row, column = np.divmod(np.arange(height * width), width)
            across = -(-width // window)
            owners.append(first + row // window * across + column // window)
            rows.append(row)
            columns.append(column)
            first += -(-height // window) * across
        owner, row, column = np.concatenate(owners), np.concatenate(rows), np.concatenate(columns)
        merged = np.argsort(owner, kind="stable")
        within = np.stack(np.divmod(np.arange(merge * merge), merge), axis=1)
        corner = merge * np.stack([row[merged], column[merged]], axis=1)
        lengths = np.bincount(owner) * merge * merge
        starts, most = np.cumsum(lengths) - lengths, lengths.max()
        inside = np.arange(most) < lengths[:, None]
        padded = starts[:, None] + np.where(inside, np.arange(most), 0)
        return cls(
            places=(corner[:, None] + within).reshape(-1, 2),
            merged=merged,
            back=np.argsort(merged),
            lengths=lengths,
            padded=padded,
            unpadded=np.flatnonzero(inside),
        )


@dataclass(frozen=True, slots=True)
class _Windows:
    """The same on the device."""

    padded: Tensor
    unpadded: Tensor
    mask: Tensor | None  # [W, 1, 1, P] bool; None: all windows are full


class QwenPart(nn.Module):
    """A `VisionPart` for pixels [height, width, 3] uint8, resized."""

    inv_freq: Tensor  # [D / 4] float32
    scale: Tensor  # [3] float32, of a byte; with `offset`, how images are normalised
    offset: Tensor

    def __init__(self, vision: QwenVision, hidden: int, placement: Placement) -> None:
        from transformers import Qwen2_5_VLVisionConfig  # seconds, and nothing that text alone needs
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        super().__init__()
        self.config = vision
        self.hidden = hidden
        self.placement = placement
        options = json.loads(vision.tower_options)
        config = Qwen2_5_VLVisionConfig(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            spatial_merge_size=vision.merge_size,
            **options,
        )
        with torch.device(placement.device):
            self.tower: Any = Qwen2_5_VisionTransformerPretrainedModel(config)
        self.to(placement.dtype)
        self._heads = config.num_heads
        self._window = config.window_size // vision.merge_size // vision.patch_size
        self._whole = frozenset(config.fullatt_block_indexes)
        dim = config.hidden_size // config.num_heads
        if self._window < 1 or config.hidden_size % config.num_heads or dim % 4:
            raise ModelError(
                f"a vision tower with windows of {config.window_size} pixels and {config.num_heads} heads over "
                f"{config.hidden_size} values is not supported"
            )
        deviation = torch.tensor(vision.image_std, device=placement.device)
        mean = torch.tensor(vision.image_mean, device=placement.device)
        self.register_buffer("scale", vision.rescale_factor / deviation, persistent=False)
        self.register_buffer("offset", -mean / deviation, persistent=False)
        theta = float((options.get("rope_parameters") or {}).get("rope_theta", 10_000.0))
        steps = torch.arange(0, dim // 2, 2, dtype=torch.float32, device=placement.device) / (dim // 2)
        self.register_buffer("inv_freq", theta**-steps, persistent=False)

    @torch.inference_mode()
    def forward(self, images: Sequence[Pixels]) -> list[Tensor]:
        merge, device = self.config.merge_size, self.placement.device
        grids = [(image.rows, image.columns) for image in images]
        order = PatchOrder.of(grids, merge, self._window)
        full = bool((order.lengths == order.lengths.max()).all())
        host = (order.places, order.merged, order.back, order.lengths, order.padded, order.unpadded)
        *arrays, raw = send((*host, self._bytes(images)), device)
        places, merged, back, lengths, padded, unpadded = arrays
        mask = None
        if not full:
            mask = (torch.arange(padded.shape[1], device=device) < lengths[:, None])[:, None, None]
        windows = _Windows(padded, unpadded, mask)
        hidden = _grouped(self._embedded(raw, images), merged, merge)
        turn = self._turn(places)
        windowed = partial(_within_windows, windows=windows)
        # patches of an image stay together: its windows follow each other
        whole = partial(_within_images, counts=[image.tokens * merge * merge for image in images])
        with sdpa_kernel(KERNELS):
            for index, block in enumerate(self.tower.blocks):
                attend = whole if index in self._whole else windowed
                hidden = hidden + self._attended(block, hidden, turn, attend)
                hidden = hidden + block.mlp(block.norm2(hidden))
        rows = self.tower.merger(hidden).index_select(0, back)
        split = torch.split(rows, [image.tokens for image in images])
        return [each.view(image.rows, image.columns, -1) for each, image in zip(split, images, strict=True)]

    def examples(self) -> Sequence[Sequence[Pixels]]:
        """One image whose windows are all full, and one with a cut window beside a full one."""
        unit = self.config.patch_size * self.config.merge_size
        grids = [(self._window, self._window), (self._window, self._window + 1)]
        return [
            [Pixels(torch.zeros(unit * rows, unit * columns, 3, dtype=torch.uint8), rows, columns)]
            for rows, columns in grids
        ]

    def padded_tokens(self, image: Pixels) -> int:
        """A cut window takes as much as a full one."""
        window = self._window
        return -(-image.rows // window) * -(-image.columns // window) * window * window

    def _bytes(self, images: Sequence[Pixels]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.concatenate([image.values.numpy().reshape(-1) for image in images])

    def _patches(self, raw: Tensor, images: Sequence[Pixels]) -> Tensor:
        """[N, 3 * frames * patch ** 2] float32, normalised, in groups of merge ** 2, which go row by row."""
        vision, parts = self.config, []
        merge, patch, frames = vision.merge_size, vision.patch_size, vision.temporal_patch_size
        flats = torch.split(raw, [image.values.numel() for image in images])
        for image, flat in zip(images, flats, strict=True):
            shape = (image.rows, merge, patch, image.columns, merge, patch, 3)
            scaled = torch.addcmul(self.offset, flat.view(shape).to(torch.float32), self.scale)
            ordered = scaled.permute(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
            parts.append(
                ordered.expand(-1, -1, -1, -1, -1, frames, -1, -1).reshape(-1, 3 * frames * patch**2)
            )
        return torch.cat(parts)

    def _embedded(self, raw: Tensor, images: Sequence[Pixels]) -> Tensor:
        """[N, C]. The tower's convolution over whole patches is a product, which cuDNN does not know it is."""
        projection = self.tower.patch_embed.proj
        patches = self._patches(raw, images).to(self.placement.dtype)
        embedded: Tensor = F.linear(patches, projection.weight.flatten(1), projection.bias)
        return embedded

    def _turn(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, D] float32 of rotary angles: rows first, then columns."""
        angles = places.to(torch.float32)[:, :, None] * self.inv_freq
        turned = angles.flatten(1).repeat(1, 2)[:, None]
        return turned.cos(), turned.sin()

    def _attended(
        self,
        block: Any,
        hidden: Tensor,
        turn: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[N, C]. Query, key and value are let go of before the next layer needs as much again."""
        merged: Tensor = block.attn.qkv(block.norm1(hidden))
        query, key, value = merged.view(len(hidden), 3, self._heads, -1).unbind(1)
        projected: Tensor = block.attn.proj(
            attend(_turned(query, *turn), _turned(key, *turn), value).flatten(1)
        )
        return projected


def load_qwen(path: str | Path, config: ModelConfig, placement: Placement) -> QwenPart:
    """Build the vision part and fill it. `ModelError` says what does not fit."""
    assert isinstance(config.vision, QwenVision)
    part = QwenPart(config.vision, config.hidden_size, placement).eval()
    layout = checkpoint_layout(config, path)
    load_weights(path, _checkpoint_tensors(part, *layout.vision_prefixes), aside=layout.language_prefixes)
    return part


def _checkpoint_tensors(part: QwenPart, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in part.tower.named_parameters():
        yield f"{prefix}{name}", tensor.data


def _grouped(values: Tensor, merged: Tensor, merge: int) -> Tensor:
    """[N, C] in another order of groups of merge ** 2."""
    return values.view(len(merged), merge * merge * values.shape[1])[merged].view(values.shape)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, heads, D] by angles [N, 1, D], in float32."""
    wide = x.to(torch.float32)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _within_images(query: Tensor, key: Tensor, value: Tensor, counts: list[int]) -> Tensor:
    """[N, heads, D]: patches attend to those of their image."""
    parts = [
        F.scaled_dot_product_attention(*(each.transpose(0, 1)[None] for each in one))[0].transpose(0, 1)
        for one in zip(*(torch.split(each, counts) for each in (query, key, value)), strict=True)
    ]
    return torch.cat(parts)


def _within_windows(query: Tensor, key: Tensor, value: Tensor, windows: _Windows) -> Tensor:
    """[N, heads, D]: patches attend to those of their window."""
    query, key, value = (each[windows.padded].transpose(1, 2) for each in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, windows.mask)  # [W, heads, P, D]
    return attended.transpose(1, 2).flatten(0, 1).index_select(0, windows.unpadded)
