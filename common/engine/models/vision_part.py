"""What a node asks of a vision part, of whichever family: pixels of images to rows of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

ENCODER_BATCH = 32  # images in one forward
ENCODER_TOKENS = 16_384  # in one forward, unless a single image has more: see encoder_memory.py


def largest_batch(tokens_per_image: int) -> int:
    """Images in one forward at most, where all have one size."""
    return max(1, min(ENCODER_BATCH, ENCODER_TOKENS // tokens_per_image))


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One decoded image on the host, as its family's encoder reads it."""

    values: Tensor
    rows: int  # in which its tokens lie
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class VisionPart(Protocol):
    """The tower, and what leads from it into the language model's width H."""

    def __call__(self, images: Sequence[Pixels]) -> list[Tensor]:
        """[rows, columns, H] on the device for each image, until the next call. Nothing waits for the device."""
        ...

    def examples(self) -> Sequence[Sequence[Pixels]]:
        """Small batches that between them go every way through the encoder."""
        ...
