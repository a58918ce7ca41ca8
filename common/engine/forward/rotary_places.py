"""Rotary positions of a prompt with images: they determine attention's angles, while KV uses sequence indices.

A model with several position axes (`RopeConfig.sections`) gives the placeholders of an image one temporal position
and counts its rows and columns from there; the following text continues after the longer of the two. So positions
fall back relative to sequence indices, by the same number for all tokens after the last image: the request's delta.
Everything here follows from the image spans, which both nodes receive, so neither has to inform the other. Source:
arXiv 2409.12191, 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from common.checkpoint.rope_config import RopeConfig
from common.messages.generation import ImageSpan

Positions = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class RotaryPlaces(Protocol):
    """The interface of a model's rotary positions."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        """Return [end - start, *RopeConfig.axes] for the tokens start .. end of a prompt with these images."""
        ...

    def delta(self, images: Sequence[ImageSpan]) -> int:
        """Return rotary position minus sequence index of every token after the prompt; never above 0."""
        ...


class OneAxis:
    """One position axis: position equals index."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        return np.arange(start, end, dtype=np.int64)

    def delta(self, images: Sequence[ImageSpan]) -> int:
        return 0


class ImageAxes:
    """Temporal, height and width positions."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        found = np.repeat(np.arange(start, end, dtype=np.int64)[:, None], 3, axis=1)
        delta = 0
        for image in images:
            if image.offset >= end:
                break
            after = image.offset + image.length
            first, last = max(image.offset, start), min(after, end)
            if first < last:
                within = np.arange(first, last) - image.offset
                row, column = within // image.columns, within % image.columns
                grid = np.stack([np.zeros_like(row), row, column], axis=1)
                found[first - start : last - start] = image.offset + delta + grid
            delta += _shift(image)
            found[max(after, start) - start :] += _shift(image)
        return found

    def delta(self, images: Sequence[ImageSpan]) -> int:
        return sum(_shift(image) for image in images)


def rotary_places(rope: RopeConfig) -> RotaryPlaces:
    """Return the rotary positions of the model that the config describes."""
    return ImageAxes() if rope.sections else OneAxis()


def _shift(image: ImageSpan) -> int:
    """Return how many positions fewer than tokens an image takes on every axis, as a negative number."""
    return max(image.rows, image.columns) - image.length
