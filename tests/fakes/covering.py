"""Pairwise covering: fewer cases than all combinations, but every pair of values occurs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per axis in which any two values of two axes occur together at least once.

    They are the same in every run: the first combination that adds the most new pairs is taken repeatedly.
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
