"""Rows that contain every pair of values of any two of their dimensions, chosen greedily."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
DRAWN = 200  # candidates for each row
NOTHING_ELSE: Mapping[str, Sequence[str]] = {}


def pairs(row: Row) -> set[Pair]:
    """Return the pairs of (dimension, value) that a row contains."""
    return set(itertools.combinations(sorted(row.items()), 2))


class Covering:
    """Draws rows that contain many of the pairs that no earlier row had."""

    def __init__(self, dimensions: Mapping[str, Sequence[str]], seed: int) -> None:
        self._dimensions = dimensions
        self._random = random.Random(seed)
        self.left: set[Pair] = {
            (one, other)
            for first, second in itertools.combinations(sorted(dimensions), 2)
            for one in ((first, value) for value in dimensions[first])
            for other in ((second, value) for value in dimensions[second])
        }
        self.all = len(self.left)

    def best(self, fixed: Row, among: Mapping[str, Sequence[str]] = NOTHING_ELSE) -> Row:
        """Return a row that extends `fixed`, in the dimensions of `among` by one of its values."""
        return max(self._candidates(fixed, among), key=self.gain)

    def gain(self, row: Row) -> int:
        """Return how many pairs of a row, which may lack dimensions, are not covered."""
        return len(pairs(row) & self.left)

    def cover(self, row: Row) -> None:
        """Count the pairs of a row as covered."""
        self.left -= pairs(row)

    def _candidates(self, fixed: Row, among: Mapping[str, Sequence[str]]) -> Iterator[Row]:
        allowed = {**self._dimensions, **among}
        for _ in range(DRAWN):
            drawn = {name: self._random.choice(values) for name, values in allowed.items()}
            yield drawn | fixed
