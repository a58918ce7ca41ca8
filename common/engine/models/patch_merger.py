"""The parts that towers over patches have in common: their sizes, and the merger that follows their blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from common.engine.layers.activations import Activations
from common.engine.layers.linear import WeightFormat
from common.engine.layers.piece import Piece

EPS = 1e-6

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class TowerSizes(NamedTuple):
    """The sizes of a tower."""

    width: int  # C values of a patch inside the tower
    inner: int  # width inside MLPs
    heads: int
    depth: int  # blocks
    patch: tuple[int, ...]  # (channels, frames, rows, columns) of the values of one patch
    group: int  # patches that are merged
    hidden: int  # width H of the language model

    @property
    def values(self) -> int:
        """Number of values of one patch."""
        return math.prod(self.patch)


class PatchMerger(nn.Module):
    """Merges groups of normed patches into rows of the language model, by two layers with a GELU between them.

    Args:
        layers: their names in the checkpoint, without `.weight`.
    """

    def __init__(self, sizes: TowerSizes, layers: tuple[str, str], weights: WeightFormat) -> None:
        super().__init__()
        self.width = sizes.group * sizes.width
        self.merge = weights.linear(self.width, {layers[0]: self.width}, True)
        self.project = weights.linear(self.width, {layers[1]: sizes.hidden}, True)

    def merged(self, normed: Tensor) -> Tensor:
        """Return [N / group, H] for [N, C]."""
        inner = F.gelu(self.merge.product(Activations(normed.view(-1, self.width))))
        return self.project.product(Activations(inner))

    def pieces(self) -> Iterator[Piece]:
        yield from self.merge.pieces()
        yield from self.project.pieces()
