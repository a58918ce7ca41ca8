"""Pairwise covering: fewer cases than all combinations, but every pair of values occurs.

With TANDEM_EXPLORE=1 `combinations` and `every_value` return all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of one value per axis: by default those of `pairs`."""
    return list(itertools.product(*axes)) if "TANDEM_EXPLORE" in os.environ else pairs(*axes)


def every_value(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return by default as many combinations as the longest axis has values, each of which occurs.

    For cases that take long, and whose parameters reach code that has nothing in common.
    """
    if "TANDEM_EXPLORE" in os.environ:
        return list(itertools.product(*axes))
    return [tuple(axis[index % len(axis)] for axis in axes) for index in range(max(map(len, axes)))]


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
