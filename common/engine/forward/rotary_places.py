"""Rotary positions of a prompt in which images stand: where a token is for attention's angles, not for its KV.

A model of several axes (`RopeConfig.sections`) gives the placeholders of an image one temporal position and counts its
rows and columns from there; the text behind goes on after the longer of the two. So positions run behind places in the
prompt, by the same number for all that follows the last image: the request's delta. Everything here follows from the
image spans, which both nodes are told; neither has to tell the other. Source: arXiv 2409.12191, 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from common.checkpoint.rope_config import RopeConfig
from common.messages.generation import ImageSpan

Positions = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class RotaryPlaces(Protocol):
    """What a node asks of the model's positions."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        """[end - start, *RopeConfig.axes] of the tokens start .. end of a prompt with these images."""
        ...

    def delta(self, images: Sequence[ImageSpan]) -> int:
        """Position less place of every token behind the prompt; never above 0."""
        ...


class OneAxis:
    """Of models whose tokens stand where they stand."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        return np.arange(start, end, dtype=np.int64)

    def delta(self, images: Sequence[ImageSpan]) -> int:
        return 0


class ImageAxes:
    """Of models with temporal, height and width positions."""

    def positions(self, images: Sequence[ImageSpan], start: int, end: int) -> Positions:
        found = np.repeat(np.arange(start, end, dtype=np.int64)[:, None], 3, axis=1)
        delta = 0
        for image in images:
            if image.offset >= end:
                break
            behind = image.offset + image.length
            first, last = max(image.offset, start), min(behind, end)
            if first < last:
                within = np.arange(first, last) - image.offset
                row, column = within // image.columns, within % image.columns
                grid = np.stack([np.zeros_like(row), row, column], axis=1)
                found[first - start : last - start] = image.offset + delta + grid
            delta += _shift(image)
            found[max(behind, start) - start :] += _shift(image)
        return found

    def delta(self, images: Sequence[ImageSpan]) -> int:
        return sum(_shift(image) for image in images)


def rotary_places(rope: RopeConfig) -> RotaryPlaces:
    """As the model's config says."""
    return ImageAxes() if rope.sections else OneAxis()


def _shift(image: ImageSpan) -> int:
    """How much less than its tokens an image takes on every axis."""
    return max(image.rows, image.columns) - image.length
