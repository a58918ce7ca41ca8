"""The task of the tiny family: grade-school word problems whose answer follows from the question alone.

Ten templates with two wordings each. An answer is two to four lines `a op b = c` and a last line `#### z`;
every number is 0..199. A question belongs to the training or to the held-out split by a hash of its text, so
a problem drawn from the held-out split was never trained on, whatever the seed.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from deploy.tiny_models.templates import LARGEST, TEMPLATES, Step

Split = Literal["train", "heldout"]
_HELD_OUT_ONE_IN = 16
_MARKED_NUMBER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its worked answer; both without leading or trailing white space."""

    template: str
    question: str
    answer: str
    value: int


def split_of(question: str) -> Split:
    """Which split a question belongs to. CRC-32 because `hash()` differs between processes."""
    return "heldout" if zlib.crc32(question.encode()) % _HELD_OUT_ONE_IN == 0 else "train"


def marked_number(text: str) -> int | None:
    """The number after the first `####`, or None. The first: a completion may run on into a next question."""
    match = _MARKED_NUMBER.search(text)
    return int(match[1]) if match else None


def is_right(problem: Problem, text: str) -> bool:
    """Whether a model's text gives the problem's number. Text is never compared, only the number."""
    return marked_number(text) == problem.value


def apply(a: int, op: str, b: int) -> int:
    """The value of one line. Division is exact by construction; anything else is an error in a template."""
    if op == "/":
        quotient, rest = divmod(a, b)
        if rest:
            raise ValueError(f"{a} / {b} leaves a rest")
        return quotient
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """Endless problems of one split; the same seed and split always give the same sequence."""
    rng = random.Random(f"{seed}/{split}")
    templates = tuple(TEMPLATES.items())
    while True:
        name, make = rng.choice(templates)
        question, steps = make(rng, rng.random() < 0.5)
        if split_of(question) == split:
            yield _solve(name, question, steps)


def take(count: int, seed: int, split: Split) -> list[Problem]:
    """The first `count` problems of a seed, each question once."""
    unique: dict[str, Problem] = {}
    for problem in problems(seed, split):
        if len(unique) == count:
            break
        unique.setdefault(problem.question, problem)
    return list(islice(unique.values(), count))


def exam(count: int, seed: int, shots: int) -> Iterator[tuple[list[Problem], Problem]]:
    """Held-out problems to score, each with its own `shots` other held-out problems to show before it."""
    drawn = take(count * (shots + 1), seed, "heldout")
    for start in range(0, len(drawn), shots + 1):
        yield drawn[start : start + shots], drawn[start + shots]


def _solve(template: str, question: str, steps: list[Step]) -> Problem:
    lines = []
    value = 0
    for a, op, b in steps:
        value = apply(a, op, b)
        assert all(0 <= number <= LARGEST for number in (a, b, value)), (template, steps)
        lines.append(f"{a} {op} {b} = {value}")
    lines.append(f"#### {value}")
    return Problem(template, question, "\n".join(lines), value)
