"""Pictures of 32 by 32 pixels with known contents: one coloured digit, or up to four coloured shapes in a grid."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.tiny_models.vision.digits import HELD_OUT, LEVELS, Split, digits

SIDE = 32
CELL = SIDE // 2
COLOURS = {"red": (225, 50, 50), "green": (50, 200, 70), "blue": (70, 100, 235), "yellow": (230, 215, 60)}
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = ("top left", "top right", "bottom left", "bottom right")
NOISE = 24  # the background has values 0 .. NOISE

Pixels = NDArray[np.uint8]  # [SIDE, SIDE, 3]


@dataclass(frozen=True, slots=True)
class DigitScene:
    """One handwritten digit."""

    digit: int
    colour: str
    pixels: Pixels


@dataclass(frozen=True, slots=True)
class ShapeScene:
    """Coloured shapes in a grid. `cells` follow the order of PLACES: (colour, shape), or None if empty."""

    cells: tuple[tuple[str, str] | None, ...]
    pixels: Pixels

    @property
    def shapes(self) -> list[tuple[str, str]]:
        return [cell for cell in self.cells if cell is not None]


def digit_scene(rng: random.Random, split: Split) -> DigitScene:
    """Draw a digit of the split, 24 or 32 pixels high, at a random position."""
    ink, labels = digits(split)
    index, colour = rng.randrange(len(labels)), rng.choice(tuple(COLOURS))
    scale = rng.choice((3, 3, 4))
    mask = np.kron(ink[index].astype(np.float32) / LEVELS, np.ones((scale, scale), dtype=np.float32))
    room = SIDE - mask.shape[0]
    return DigitScene(
        int(labels[index]), colour, _paint(rng, [(mask, rng.randint(0, room), rng.randint(0, room), colour)])
    )


def shape_scene(rng: random.Random, split: Split) -> ShapeScene:
    """Draw one to four shapes; no arrangement occurs in both splits."""
    while True:
        filled = rng.sample(range(4), rng.randint(1, 4))
        cells = tuple(
            (rng.choice(tuple(COLOURS)), rng.choice(SHAPES)) if place in filled else None
            for place in range(4)
        )
        if (zlib.crc32(repr(cells).encode()) % HELD_OUT == 0) == (split == "heldout"):
            break
    marks = []
    for place, cell in enumerate(cells):
        if cell is not None:
            mask = _shape(cell[1], rng.randint(8, 12))
            room = CELL - mask.shape[0]
            top, left = place // 2 * CELL + rng.randint(0, room), place % 2 * CELL + rng.randint(0, room)
            marks.append((mask, top, left, cell[0]))
    return ShapeScene(cells, _paint(rng, marks))


def _paint(rng: random.Random, marks: list[tuple[NDArray[np.float32], int, int, str]]) -> Pixels:
    """Paint marks (mask 0 .. 1, top, left, colour) over a noisy dark background."""
    noise = np.random.default_rng(rng.getrandbits(32))
    canvas = noise.integers(0, NOISE + 1, (SIDE, SIDE, 3)).astype(np.float32)
    for mask, top, left, colour in marks:
        area = canvas[top : top + mask.shape[0], left : left + mask.shape[1]]
        jitter = noise.integers(-20, 21, 3)
        area += mask[..., None] * (np.array(COLOURS[colour]) + jitter - area)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _shape(name: str, size: int) -> NDArray[np.float32]:
    """Return a mask [size, size] that is 1 inside the shape."""
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    middle = (size - 1) / 2
    if name == "circle":
        inside = (y - middle) ** 2 + (x - middle) ** 2 <= (size / 2) ** 2
    elif name == "square":
        inside = np.ones((size, size), dtype=bool)
    elif name == "triangle":
        inside = np.abs(x - middle) <= (y + 1) / 2
    else:
        arm = size / 6
        inside = (np.abs(x - middle) <= arm) | (np.abs(y - middle) <= arm)
    return np.asarray(inside, dtype=np.float32)
