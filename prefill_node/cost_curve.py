"""The cost curve of a prefill node: the milliseconds of a forward by its tokens.

A forward takes as long as the smallest size that holds its tokens (graphs are captured per size), plus what attention
over tokens of earlier forwards adds. By the curve the scheduler decides which prompts share a forward, and where long
ones are cut. Its memory is bounded by the number of sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

TOLERANCE = 0.02  # by which cutting a prompt may lengthen it
LEARNING = 0.1  # weight of a new measurement
# Before anything is measured: a fixed part that equals the time of FIXED_TOKENS, then a constant time per token.
FIXED_TOKENS = 64
DEFAULT_MS_PER_TOKEN = 0.1
DEFAULT_CONTEXT_TOKENS = 32_768  # context whose attention doubles the time of a token


class CostCurve:
    """Milliseconds by tokens at a fixed list of sizes."""

    def __init__(
        self, sizes: Sequence[int], measured: Mapping[int, float] | None = None, grid: int = 1
    ) -> None:
        """Take times at any number of sizes; those in between are interpolated.

        Args:
            sizes: ascending token counts; the last is the largest forward.
            measured: tokens -> milliseconds; the default curve if empty.
            grid: prompts are cut only at multiples of it, and the largest size is one.
        """
        self.sizes = tuple(sizes)
        self._grid = grid
        self._logs = [math.log2(size) for size in self.sizes]
        points = sorted((measured or _default(self.sizes)).items())
        self._ms = [_interpolated(points, size) for size in self.sizes]
        self._context_ms = self._ms[-1] / self.largest / DEFAULT_CONTEXT_TOKENS
        self.step = self._choose_step()

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def size_of(self, tokens: int) -> int:
        """Return the smallest size that holds `tokens`, at most the largest one."""
        return self.sizes[self._index(tokens)]

    def ms(self, tokens: int, contexts: int = 0) -> float:
        """Return the milliseconds of one forward.

        `contexts`: tokens of earlier forwards that each of its tokens attends to, summed up.
        """
        return self._ms[self._index(tokens)] + self._context_ms * contexts

    def prompt_ms(self, tokens: int, start: int = 0) -> float:
        """Return the milliseconds of `tokens` of one prompt after the first `start` ones, cut where `cut` says."""
        context = self._context_ms * start * tokens
        if tokens <= self.step or not self._pays_to_cut(tokens):
            return self.ms(min(tokens, self.largest)) + context
        whole, rest = divmod(tokens, self.step)
        # Tokens of a prompt's earlier chunks: 0, step, 2 * step ... for `step` tokens each, then for the rest.
        earlier = self.step * self.step * whole * (whole - 1) // 2 + whole * self.step * rest
        return (
            whole * self.ms(self.step)
            + (self.ms(rest) if rest else 0.0)
            + self._context_ms * earlier
            + context
        )

    def cut(self, tokens: int) -> int:
        """Return how many of a prompt's remaining `tokens` its next forward has: all, or `step` of them."""
        return self.step if tokens > self.step and self._pays_to_cut(tokens) else tokens

    def _pays_to_cut(self, tokens: int) -> bool:
        if tokens > self.largest:
            return True
        whole, rest = divmod(tokens, self.step)
        cut = whole * self.ms(self.step) + (self.ms(rest) if rest else 0.0)
        return cut <= (1 + 2 * TOLERANCE) * self.ms(tokens)

    def learn(self, tokens: int, contexts: int, ms: float) -> None:
        """Take in the measured time of one forward. Sizes within a factor of two learn from it, the nearer the more."""
        if contexts > tokens * tokens:
            spent = ms - self.ms(tokens)
            self._context_ms += LEARNING * (_near(spent / contexts, self._context_ms) - self._context_ms)
            return
        expected = self.ms(tokens, contexts)
        change = math.log(_near(ms, expected) / expected)
        at = self._logs[self._index(tokens)]
        for index, log in enumerate(self._logs):
            weight = 1.0 - abs(log - at)
            if weight > 0.0:
                self._ms[index] *= math.exp(LEARNING * weight * change)
        self.step = self._choose_step()

    def _index(self, tokens: int) -> int:
        return min(bisect_left(self.sizes, tokens), len(self.sizes) - 1)

    def _choose_step(self) -> int:
        """Return the smallest size whose time per token is nearly the lowest, on the grid."""
        rates = [ms / size for ms, size in zip(self._ms, self.sizes, strict=True)]
        limit = (1 + TOLERANCE) * min(rates)
        size = next(size for size, rate in zip(self.sizes, rates, strict=True) if rate <= limit)
        return max(size - size % self._grid, self._grid)


def _default(sizes: Sequence[int]) -> dict[int, float]:
    return {size: (FIXED_TOKENS + size) * DEFAULT_MS_PER_TOKEN for size in sizes}


def _interpolated(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the time at `size`: on the line between two points, before the first its time, past the last its rate."""
    index = bisect_left([tokens for tokens, _ in points], size)
    if index == 0:
        return points[0][1]
    if index == len(points):
        tokens, ms = points[-1]
        return ms * size / tokens
    (low, low_ms), (high, high_ms) = points[index - 1], points[index]
    return low_ms + (high_ms - low_ms) * (size - low) / (high - low)


def _near(value: float, expected: float) -> float:
    """Return a measurement, kept within a factor of two of what was expected, so that one outlier changes little."""
    return min(max(value, expected / 2), expected * 2)
