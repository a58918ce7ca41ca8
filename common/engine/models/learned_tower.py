"""The layers of Qwen3.5's vision tower, which is that of Qwen3-VL without deep stacking.

Learned positions are interpolated to the size of each image, every block attends within whole images, and a block is
norm, attention, norm, MLP around one stream. The interface is that of `qwen_tower.VisionTower`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.attention.segments import Segments
from common.engine.formats.dense import DenseFormat, LibraryLinear
from common.engine.layers.activations import Activations
from common.engine.layers.linear import Embedding, WeightFormat
from common.engine.layers.norm import LayerNorm
from common.engine.layers.piece import Piece
from common.engine.layers.placement import Placement, parameter
from common.engine.models.patch_attention import PatchAttention
from common.engine.models.patch_merger import EPS, Ints, PatchMerger, TowerSizes

CORNERS = 4  # learned positions around an interpolated one

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class LearnedBlock(nn.Module):
    """One block over the patches of all images of a batch."""

    def __init__(self, name: str, width: int, inner: int, heads: int, weights: WeightFormat) -> None:
        super().__init__()
        self.norm1 = LayerNorm(f"{name}.norm1", width, EPS, weights.placement)
        self.norm2 = LayerNorm(f"{name}.norm2", width, EPS, weights.placement)
        self.attention = PatchAttention(name, width, heads, weights)
        self.up = weights.linear(width, {f"{name}.mlp.linear_fc1": inner}, True)
        self.down = weights.linear(inner, {f"{name}.mlp.linear_fc2": width}, True)

    def forward(
        self, x: Tensor, residual: Tensor | None, turn: tuple[Tensor, Tensor], segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Return (x, residual) after the block; the stream is x + residual (None: only x) [N, C]."""
        stream = x if residual is None else x + residual
        stream = stream + self.attention(self.norm1(stream), turn, segments)
        inner = F.gelu(self.up.product(Activations(self.norm2(stream))), approximate="tanh")
        return self.down.product(Activations(inner)), stream

    def pieces(self) -> Iterator[Piece]:
        for part in (self.norm1, self.norm2, self.attention, self.up, self.down):
            yield from part.pieces()


class LearnedTower(nn.Module):
    """Embeds patches, runs the blocks, and merges groups of patches into rows of the language model.

    Args:
        side: learned positions along each side of an image.
    """

    def __init__(self, sizes: TowerSizes, side: int, placement: Placement) -> None:
        super().__init__()
        width, self.patch, self.side = sizes.width, sizes.patch, side
        weights = DenseFormat(placement, LibraryLinear)
        self.embed = weights.linear(sizes.values, {"patch_embed.proj": width}, True)
        self.positions = Embedding(
            "pos_embed", side * side, range(side * side), parameter((side * side, width), placement)
        )
        self.blocks = nn.ModuleList(
            LearnedBlock(f"blocks.{index}", width, sizes.inner, sizes.heads, weights)
            for index in range(sizes.depth)
        )
        self.norm = LayerNorm("merger.norm", width, EPS, placement)
        self.merger = PatchMerger(sizes, ("merger.linear_fc1", "merger.linear_fc2"), weights)

    def embedded(self, patches: Tensor) -> Tensor:
        """Return [N, C] for [N, values], without positions."""
        return self.embed.product(Activations(patches))

    def corners(self, places: Ints, sizes: Sequence[tuple[int, int]]) -> Sequence[Ints | Floats]:
        """Return what `placed` needs for the patches of images, see `corners_of`."""
        return corners_of(places, sizes, self.side)

    def placed(self, embedded: Tensor, positions: Sequence[Tensor]) -> Tensor:
        """Add interpolated positions to [N, C]; `positions` are the results of `corners` on the device."""
        corners, shares = positions
        total = torch.zeros(embedded.shape, dtype=torch.float32, device=embedded.device)
        for corner, share in zip(corners, shares, strict=True):
            total.addcmul_(self.positions(corner).to(torch.float32), share[:, None])
        return embedded + total.to(embedded.dtype)

    def merged(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return [N / group, H] for x and residual [N, C]."""
        return self.merger.merged(self.norm(x + residual))

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces it reads. Their names lack the prefix that the checkpoint's layout has for the tower."""
        for piece in self.embed.pieces():
            view = piece.into
            yield Piece.all_of(piece.name, view.view(-1, *self.patch) if view.ndim == 2 else view)
        yield from self.positions.pieces()
        for block in self.blocks:
            assert isinstance(block, LearnedBlock)
            yield from block.pieces()
        yield from self.norm.pieces()
        yield from self.merger.pieces()


def corners_of(places: Ints, sizes: Sequence[tuple[int, int]], side: int) -> tuple[Ints, Floats]:
    """Return the learned positions around each patch and their shares, each [CORNERS, N].

    The first and last patches of a side have the first and last positions, those between them are spread evenly.

    Args:
        places: [N, 2] row and column of each patch in its image, image by image.
        sizes: (rows, columns) of patches of each image.
        side: number of learned positions along a side.
    """
    counts = [rows * columns for rows, columns in sizes]
    steps = np.array([[(side - 1) / max(size - 1, 1) for size in image] for image in sizes])
    exact = places * np.repeat(steps, counts, axis=0)
    low = np.floor(exact).astype(np.int64)
    high = np.minimum(low + 1, side - 1)
    after = exact - low
    (top, left), (bottom, right), (down, across) = low.T, high.T, after.T
    corners = np.stack([row * side + column for row in (top, bottom) for column in (left, right)])
    shares = np.stack([row * column for row in (1 - down, down) for column in (1 - across, across)])
    return corners, shares.astype(np.float32)
