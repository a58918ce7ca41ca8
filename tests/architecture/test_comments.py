"""Comments are above the lines that they explain, and their lines are filled. No linter checks this."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.architecture.source_tree import PACKAGES, modules

# A comment after a bracket that closes earlier lines: the formatter has broken the bracket because of the comment.
DANGLING = re.compile(r"\s*[])}]+( = \S+|\.\w+\(\))?[:,]?\s+# (?!type: ignore|fmt: |noqa|pragma)")
# Three lines that the formatter has made of one: parentheses around a value, because of the comment after it.
WRAPPED = re.compile(r".* = \($"), re.compile(r"\s+[^#]*\S  # (?!type: ignore|noqa)"), re.compile(r"\s*\)$")
# Up to three words of a sentence on a line of their own, and how the next line continues the sentence.
FRAGMENT = re.compile(r"\s*# ([^\s.:;]+ ?){1,3}$")
CONTINUED = re.compile(r"\s*# [a-z]")


def misplaced(text: str) -> list[int]:
    """Return the numbers of the lines that break a rule."""
    lines = text.splitlines()
    dangling = [number for number, line in enumerate(lines, 1) if DANGLING.match(line)]
    wrapped = [
        number
        for number, group in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1)
        if all(pattern.match(line) for pattern, line in zip(WRAPPED, group, strict=True))
    ]
    broken = [
        number
        for number, (line, following) in enumerate(pairwise(lines), 1)
        if FRAGMENT.fullmatch(line) and CONTINUED.match(following)
    ]
    return sorted({*dangling, *wrapped, *broken})


def test_comments_are_above_what_they_explain_and_filled() -> None:
    wrong = [
        f"{module.place}:{line}"
        for module in modules((*PACKAGES, "tests"))
        for line in misplaced(module.text)
    ]
    assert not wrong, "put the comment above the statement, and fill its lines: " + ", ".join(wrong)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = f(\n    1\n)  # the only one\n", [3]),
        ("if (\n    x\n):  # never\n    pass\n", [3]),
        ("x = f(\n    1\n)  # type: ignore[arg-type]\n", []),
        ("x = f(1)  # the only one\n", []),
        ("x: int = (\n    1  # the only one\n)\n", [1]),
        ("x: tuple[\n    int, ...\n] = ()  # none\n", [3]),
        ("x = f(\n    1\n).copy()  # the only one\n", [3]),
        ("x = (\n    1  # the first one\n    + 2\n)\n", []),
        ("# A connection of\n# a\n# peer that has ended.\n", [1, 2]),
        ("# waiting\n# Seconds until it ends.\n", []),
        ("# A whole sentence.\n# and another line\n", []),
    ],
)
def test_misplaced_comments_are_found(text: str, lines: list[int]) -> None:
    assert misplaced(text) == lines
