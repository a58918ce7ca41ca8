"""Fewer cases than all combinations, and still every pair: what breaks on two values together is found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations, one value of each axis, in which any two values of two axes stand together at least once. The same
    ones in every run: again and again the first that brings the most new pairs.
    """
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return [tuple(axis[index] for axis, index in zip(axes, row)) for row in sorted(chosen)]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(row), 2))
