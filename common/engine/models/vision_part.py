"""The interface of a vision part of any family: pixels of images in, rows of embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from common.checkpoint.vision_tower import VisionConfig
from common.engine.layers.placement import Placement


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One decoded image on the host, in the form that its family's encoder reads."""

    values: Tensor
    rows: int  # rows of its tokens
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class VisionPart(Protocol):
    """The vision tower and the projection to the language model's width H."""

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        """Return [rows, columns, H] on the device per image, valid until the next call.

        Never waits for the device.
        """
        ...

    def examples(self) -> Sequence[Sequence[Pixels]]:
        """Return small batches that together cover all paths through the encoder."""
        ...


class LoadedVisionPart(VisionPart, Protocol):
    """A vision part as it is loaded, without graphs."""

    @property
    def config(self) -> VisionConfig: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def runs_on_device(self) -> bool:
        """True if a forward needs no batch data from the host, so that graphs can capture it."""
        ...
