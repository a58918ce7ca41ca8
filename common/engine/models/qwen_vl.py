"""The vision part of Qwen2.5-VL and Qwen3.5: a tower over patches of images of any size.

Most layers of Qwen2.5-VL's tower attend within windows; in Qwen3.5's, each image is one window. Patches are sorted by
window, so that each window and each image is a run of rows: no patch is moved between layers, and none is padded. The
host computes patch positions, windows and the inverse order from the sizes of the images. Source: arXiv 2502.13923,
2.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.checkpoint.model_config import ModelConfig
from common.checkpoint.mtp_format import module_prefixes
from common.checkpoint.qwen_vl_config import MAX_IMAGE_TOKENS, TOWER_DEFAULTS, QwenVision
from common.engine.attention.segments import Segments, segments_of, takes_flash
from common.engine.host_copies import send
from common.engine.layers.placement import Placement
from common.engine.models.checkpoint_layout import checkpoint_layout
from common.engine.models.learned_tower import LearnedTower
from common.engine.models.model_size import check_tower_size
from common.engine.models.patch_merger import Ints, TowerSizes
from common.engine.models.qwen_tower import VisionTower
from common.engine.models.vision_part import Pixels
from common.engine.ops.rotary import rotary_angles_by_axis
from common.engine.weights import load_weights
from common.errors import ModelError


@dataclass(frozen=True, slots=True)
class PatchOrder:
    """N patches of a batch sorted by window; `merge` squared neighbours stay together."""

    places: Ints  # [N, 2] row and column in its image, in sorted order
    merged: Ints  # [N / merge ** 2] index of each sorted group of patches in the processor's order
    back: Ints  # [N / merge ** 2] the inverse permutation
    windows: Ints  # [W] number of patches per window

    @classmethod
    def of(cls, grids: Sequence[tuple[int, int]], merge: int, window: int) -> PatchOrder:
        """Return the order for images with this many (rows, columns) of groups, in windows of `window` by `window`
        groups.
        """
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
        return cls(
            places=(corner[:, None] + within).reshape(-1, 2),
            merged=merged,
            back=np.argsort(merged),
            windows=np.bincount(owner) * merge * merge,
        )


@dataclass(frozen=True, slots=True)
class PatchBatch:
    """T groups of patches on the device, sorted by window."""

    groups: Tensor  # [T, merge ** 2 * C] embedded
    places: Tensor  # [T, merge ** 2 * 2] int64, row and column of each patch
    back: Tensor  # [T] int64: sorted index of each group of the processor's order
    windows: Segments  # runs of patches per window
    whole: Segments  # runs of patches per image


class QwenPart(nn.Module):
    """A `VisionPart` for pixels [height, width, 3] uint8, resized."""

    inv_freq: Tensor  # [D / 2] float32
    axes: Tensor  # [D / 2] int64: the row rotates the first half of the frequencies, the column the second
    scale: Tensor  # [3] float32; byte * scale + offset normalises an image
    offset: Tensor

    def __init__(self, vision: QwenVision, hidden: int, placement: Placement) -> None:
        super().__init__()
        self.config = vision
        self.placement = placement
        options = {**TOWER_DEFAULTS, **json.loads(vision.tower_options)}
        width, heads = options["hidden_size"], options["num_heads"]
        self.group = vision.merge_size**2
        self.width, self.head_dim = width, width // heads
        dim, self._learned = width // heads, bool(options.get("learned"))
        self._window = options["window_size"] // vision.merge_size // vision.patch_size
        self._whole = frozenset(options["fullatt_block_indexes"])
        if self._learned:
            self._window, self._whole = MAX_IMAGE_TOKENS, frozenset(range(options["depth"]))
        self.window = (self._window * vision.merge_size) ** 2  # maximum number of patches per window
        if self._window < 1 or width % heads or dim % 4:
            raise ModelError(
                f"a vision tower with windows of {options['window_size']} pixels and {heads} heads over {width} values "
                "is not supported"
            )
        if not self._learned and options["hidden_act"] != "silu":
            raise ModelError(
                f"a vision tower with activation {options['hidden_act']!r} is not supported, only silu"
            )
        patch = (3, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        inner, depth = options["intermediate_size"], options["depth"]
        sizes = TowerSizes(width, inner, heads, depth, patch, self.group, hidden)
        self.tower: VisionTower | LearnedTower
        if self._learned:
            side = math.isqrt(options["num_position_embeddings"])
            self.tower = LearnedTower(sizes, side, placement)
        else:
            self.tower = VisionTower(sizes, placement)
        device = placement.device
        deviation = torch.tensor(vision.image_std, device=device)
        mean = torch.tensor(vision.image_mean, device=device)
        self.register_buffer("scale", vision.rescale_factor / deviation, persistent=False)
        self.register_buffer("offset", -mean / deviation, persistent=False)
        theta = float((options["rope_parameters"] or {}).get("rope_theta", 10_000.0))
        steps = torch.arange(0, dim // 2, 2, dtype=torch.float32, device=device) / (dim // 2)
        self.register_buffer("inv_freq", (theta**-steps).repeat(2), persistent=False)
        axes = torch.arange(2, device=device).repeat_interleave(dim // 4)
        self.register_buffer("axes", axes, persistent=False)

    @property
    def runs_on_device(self) -> bool:
        """True if `encode` needs no batch data from the host, or runs on the host itself."""
        placement = self.placement
        on_host = placement.device.type == "cpu"
        return on_host or takes_flash(placement.dtype, self.head_dim, placement.device)

    def forward(self, images: Sequence[Pixels]) -> list[Tensor]:
        batch = self.batch(images)
        rows = self.encode(batch.groups, batch.places, batch.windows, batch.whole)
        return self.rows(rows, batch, images)

    @torch.inference_mode()
    def batch(self, images: Sequence[Pixels]) -> PatchBatch:
        """Return the inputs of the blocks for these images, on the device."""
        merge, device = self.config.merge_size, self.placement.device
        order = PatchOrder.of([(image.rows, image.columns) for image in images], merge, self._window)
        counts = np.array([image.tokens * merge * merge for image in images])
        host = (order.places, order.merged, order.back, _starts(order.windows), _starts(counts))
        sizes = [(image.rows * merge, image.columns * merge) for image in images]
        learned = self.tower.corners(order.places, sizes)
        *arrays, raw = send((*host, *learned, self._bytes(images)), device)
        places, merged, back, window_starts, image_starts, *positions = arrays
        embedded = self.tower.embedded(self.patches(raw, images).to(self.placement.dtype))
        # Where positions are learned, an image is one window: patches are still in the processor's order.
        embedded = self.tower.placed(embedded, positions)
        return PatchBatch(
            groups=embedded.view(len(merged), -1)[merged],
            places=places.view(len(merged), -1),
            back=back,
            windows=segments_of(tuple(order.windows.tolist()), window_starts),
            # Patches of an image stay together, since its windows are consecutive.
            whole=segments_of(tuple(counts.tolist()), image_starts),
        )

    @torch.inference_mode()
    def encode(self, groups: Tensor, places: Tensor, windows: Segments, whole: Segments) -> Tensor:
        """Run the blocks and the merger: [T, H], in sorted order. Rows past the last run are undefined."""
        patches = places.view(-1, 2)
        x, residual = groups.view(len(patches), -1), None
        turn = rotary_angles_by_axis(patches, self.axes, self.inv_freq, 1.0, torch.float32)
        for index, block in enumerate(self.tower.blocks):
            x, residual = block(x, residual, turn, whole if index in self._whole else windows)
        assert residual is not None  # a tower has at least one block
        rows: Tensor = self.tower.merged(x, residual)
        return rows

    @torch.inference_mode()
    def rows(self, encoded: Tensor, batch: PatchBatch, images: Sequence[Pixels]) -> list[Tensor]:
        """Return copies of the result of `encode` for a batch, per image."""
        split = torch.split(encoded.index_select(0, batch.back), [image.tokens for image in images])
        return [each.view(image.rows, image.columns, -1) for each, image in zip(split, images, strict=True)]

    def examples(self) -> Sequence[Sequence[Pixels]]:
        """Return one image that has a full window and a cut one, or a small one if there are no windows."""
        unit, rows = self.config.patch_size * self.config.merge_size, 2 if self._learned else self._window
        columns = rows + 1
        return [[Pixels(torch.zeros(unit * rows, unit * columns, 3, dtype=torch.uint8), rows, columns)]]

    def _bytes(self, images: Sequence[Pixels]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return np.concatenate([image.values.numpy().reshape(-1) for image in images])

    def patches(self, raw: Tensor, images: Sequence[Pixels]) -> Tensor:
        """Return [N, 3 * frames * patch ** 2] float32, normalised, in groups of merge ** 2 in row-major order."""
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
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def load_qwen(path: str | Path, config: ModelConfig, placement: Placement) -> QwenPart:
    """Build and fill the vision part. Raises ModelError with what does not fit."""
    assert isinstance(config.vision, QwenVision)
    check_tower_size(Path(path), config.vision, config.hidden_size)
    part = QwenPart(config.vision, config.hidden_size, placement).eval()
    layout = checkpoint_layout(config, path)
    (prefix,) = layout.vision_prefixes
    pieces = (piece._replace(name=f"{prefix}{piece.name}") for piece in part.tower.pieces())
    modules = module_prefixes(Path(path))
    load_weights(path, pieces, aside=(*layout.language_prefixes, *modules))
    return part


def _starts(lengths: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Return the starts [S + 1] of consecutive runs."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
