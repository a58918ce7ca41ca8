"""Questions about drawn pictures, with their answers; some have two pictures, some none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deploy.tiny_models.vision.digits import Split
from deploy.tiny_models.vision.scenes import (
    COLOURS,
    PLACES,
    SHAPES,
    DigitScene,
    Pixels,
    ShapeScene,
    digit_scene,
    shape_scene,
)

_FACTS = re.compile("|".join((r"\d+", "nothing", *COLOURS, *SHAPES)))


@dataclass(frozen=True, slots=True)
class Question:
    """One question; the pictures precede the text."""

    kind: str
    images: tuple[Pixels, ...]
    text: str
    answer: str  # without the leading space that the model generates


def facts(text: str) -> list[str]:
    """Return the facts of an answer that are scored: its numbers, colours and shapes, in order."""
    return _FACTS.findall(text)


def is_right(question: Question, said: str) -> bool:
    return facts(said) == facts(question.answer)


def _digit(rng: random.Random, scene: DigitScene) -> tuple[str, str]:
    return "What digit is this?", f"This is the digit {scene.digit}."


def _digit_colour(rng: random.Random, scene: DigitScene) -> tuple[str, str]:
    return "Which colour is the digit?", f"The digit is {scene.colour}."


def _digit_both(rng: random.Random, scene: DigitScene) -> tuple[str, str]:
    return "What do you see?", f"I see the digit {scene.digit} in {scene.colour}."


def _count(rng: random.Random, scene: ShapeScene) -> tuple[str, str]:
    return "How many shapes are there?", f"I count {len(scene.shapes)} shapes."


def _count_shape(rng: random.Random, scene: ShapeScene) -> tuple[str, str]:
    shape = rng.choice([shape for _, shape in scene.shapes])
    many = sum(each == shape for _, each in scene.shapes)
    plural = "crosses" if shape == "cross" else f"{shape}s"
    return f"How many {plural} are there?", f"I count {many} {plural}."


def _count_colour(rng: random.Random, scene: ShapeScene) -> tuple[str, str]:
    colour = rng.choice([colour for colour, _ in scene.shapes])
    many = sum(each == colour for each, _ in scene.shapes)
    return f"How many {colour} shapes are there?", f"I count {many} {colour} shapes."


def _which_colour(rng: random.Random, scene: ShapeScene) -> tuple[str, str]:
    shapes = [shape for _, shape in scene.shapes]
    single = [(colour, shape) for colour, shape in scene.shapes if shapes.count(shape) == 1]
    if not single:
        return _count(rng, scene)
    colour, shape = rng.choice(single)
    return f"Which colour is the {shape}?", f"The {shape} is {colour}."


def _describe(rng: random.Random, scene: ShapeScene) -> tuple[str, str]:
    parts = [
        f"{place}: {'nothing' if cell is None else ' '.join(cell)}"
        for place, cell in zip(PLACES, scene.cells, strict=True)
    ]
    return "Describe the picture.", f"In the picture is {', '.join(parts)}."


_OF_DIGIT: tuple[Callable[[random.Random, DigitScene], tuple[str, str]], ...] = (
    _digit,
    _digit_colour,
    _digit_both,
)
_OF_SHAPES: tuple[Callable[[random.Random, ShapeScene], tuple[str, str]], ...] = (
    _count,
    _count_shape,
    _count_colour,
    _which_colour,
    _describe,
    _describe,
)


def _name(ask: Callable[..., object]) -> str:
    return ask.__name__.lstrip("_")


def _one_picture(rng: random.Random, split: Split) -> Question:
    if rng.random() < 0.45:
        scene, ask = digit_scene(rng, split), rng.choice(_OF_DIGIT)
        return Question(_name(ask), (scene.pixels,), *ask(rng, scene))
    shapes, ask_shapes = shape_scene(rng, split), rng.choice(_OF_SHAPES)
    return Question(_name(ask_shapes), (shapes.pixels,), *ask_shapes(rng, shapes))


def _two_pictures(rng: random.Random, split: Split) -> Question:
    if rng.random() < 0.6:
        a, b = digit_scene(rng, split), digit_scene(rng, split)
        pictures = (a.pixels, b.pixels)
        if rng.random() < 0.5:
            return Question(
                "two_digits", pictures, "What digits are these?", f"These are {a.digit} and {b.digit}."
            )
        total = f"{a.digit} + {b.digit} = {a.digit + b.digit}"
        return Question("sum", pictures, "What is the sum of the digits?", total)
    digit, shapes = digit_scene(rng, split), shape_scene(rng, split)
    text = "What digit is in the first picture, and how many shapes are in the second?"
    answer = f"The digit {digit.digit}, and {len(shapes.shapes)} shapes."
    return Question("digit_and_count", (digit.pixels, shapes.pixels), text, answer)


def _no_picture(rng: random.Random) -> Question:
    a, b = rng.randrange(10), rng.randrange(10)
    return Question("text", (), f"What is {a} + {b}?", f"{a} + {b} = {a + b}")


def questions(seed: int, split: Split) -> Iterator[Question]:
    """Yield endless questions of one split: mostly with one picture, sometimes two, rarely none."""
    rng = random.Random(f"vision/{seed}/{split}")
    while True:
        drawn = rng.random()
        if drawn < 0.08:
            yield _no_picture(rng)
        elif drawn < 0.78:
            yield _one_picture(rng, split)
        else:
            yield _two_pictures(rng, split)
