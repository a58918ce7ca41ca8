"""The task of the tiny models: grade-school word problems whose answer follows from the question itself.

There are ten templates with two wordings each. An answer has two to four lines `a op b = c` and a last line `#### z`;
every number is in 0..199. A hash of its text assigns a question to the training or the held-out split, so a problem of
the held-out split was never trained on, whatever the seed.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deploy.tiny_models.templates import LARGEST, TEMPLATES, Step

Split = Literal["train", "heldout"]
_HELD_OUT_ONE_IN = 16
_MARKED_NUMBER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its worked answer, both without leading or trailing white space."""

    template: str
    question: str
    answer: str
    value: int


def split_of(question: str) -> Split:
    """Return the split of a question. It uses CRC-32 because `hash()` differs between processes."""
    return "heldout" if zlib.crc32(question.encode()) % _HELD_OUT_ONE_IN == 0 else "train"


def marked_number(text: str) -> int | None:
    """Return the number after the first `####`, or None. A completion may run on into a further question."""
    match = _MARKED_NUMBER.search(text)
    return int(match[1]) if match else None


def is_right(problem: Problem, text: str) -> bool:
    """Return whether a model's text gives the correct number. Only the number is compared."""
    return marked_number(text) == problem.value


def apply(a: int, op: str, b: int) -> int:
    """Return the value of one line. Division is exact by construction; otherwise the template has a bug."""
    if op == "/":
        quotient, rest = divmod(a, b)
        if rest:
            raise ValueError(f"{a} / {b} has a remainder")
        return quotient
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """Yield endless problems of one split; the same seed and split always give the same sequence."""
    rng = random.Random(f"{seed}/{split}")
    templates = tuple(TEMPLATES.items())
    while True:
        name, make = rng.choice(templates)
        question, steps = make(rng, rng.random() < 0.5)
        if split_of(question) == split:
            yield _solve(name, question, steps)


def take(count: int, seed: int, split: Split) -> list[Problem]:
    """Return the first `count` problems of a seed, each question once."""
    unique: dict[str, Problem] = {}
    for problem in problems(seed, split):
        if len(unique) == count:
            break
        unique.setdefault(problem.question, problem)
    return list(unique.values())


def exam(count: int, seed: int, shots: int) -> Iterator[tuple[list[Problem], Problem]]:
    """Yield held-out problems to score, each with its own `shots` other held-out problems to show before it."""
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
