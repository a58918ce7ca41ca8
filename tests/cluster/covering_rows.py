"""Rows that contain every pair of values of any two of their dimensions, chosen greedily."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
DRAWN = 60  # candidates for each row


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

    def best(self, fixed: Row) -> Row:
        """Return a row that extends `fixed`."""
        return max(self._candidates(fixed), key=lambda row: len(pairs(row) & self.left))

    def cover(self, row: Row) -> None:
        """Count the pairs of a row as covered."""
        self.left -= pairs(row)

    def _candidates(self, fixed: Row) -> Iterator[Row]:
        for _ in range(DRAWN):
            drawn = {name: self._random.choice(values) for name, values in self._dimensions.items()}
            yield drawn | fixed
