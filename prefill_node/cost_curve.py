"""The cost curve of a prefill node: the milliseconds of a forward by its number of tokens.

A forward takes as long as the smallest size that holds its tokens (graphs are captured per size), plus what attention
over tokens of earlier forwards adds. By the curve the scheduler decides which prompts share a forward, and where long
ones are cut. Its memory is bounded by the number of sizes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

TOLERANCE = 0.02  # by which the time per token of a step may exceed the lowest one
LEARNING = 0.1  # weight of a new measurement
# A forward teaches what context costs if its context takes at least this part of the time that it takes without.
CONTEXT_PART = 0.5
CONTEXT_RANGE = 4.0  # the factor by which the learnt cost of context may differ from the first one
# Before anything is measured: a fixed part that equals the time of FIXED_TOKENS, then a constant time per token.
FIXED_TOKENS = 64
DEFAULT_MS_PER_TOKEN = 0.1
DEFAULT_CONTEXT_TOKENS = 32_768  # context whose attention doubles the time of a token


class CostCurve:
    """Milliseconds by tokens at a fixed list of sizes."""

    def __init__(
        self,
        sizes: Sequence[int],
        measured: Mapping[int, float] | None = None,
        grid: int = 1,
        context_ms: float = 0.0,
    ) -> None:
        """Take times at any number of sizes; those in between are interpolated.

        Args:
            sizes: ascending token counts; the last is the largest forward.
            measured: tokens -> milliseconds; the default curve if empty.
            grid: prompts are cut only at multiples of it, and the largest size is one.
            context_ms: milliseconds per token and token of its context; 0.0: a default.
        """
        self.sizes = tuple(sizes)
        self._grid = grid
        self._logs = [math.log2(size) for size in self.sizes]
        points = sorted((measured or _default(self.sizes)).items())
        self._ms = [_interpolated(points, size) for size in self.sizes]
        self._first_context_ms = context_ms or self._ms[-1] / self.largest / DEFAULT_CONTEXT_TOKENS
        self._context_ms = self._first_context_ms
        self.step = self._choose_step()

    def up_to(self, tokens: int) -> CostCurve:
        """Return the present curve of forwards with at most so many tokens, or the smallest that the grid allows."""
        fitting = [index for index, size in enumerate(self.sizes) if not size % self._grid]
        count = max((index + 1 for index in fitting if self.sizes[index] <= tokens), default=fitting[0] + 1)
        measured = dict(zip(self.sizes[:count], self._ms))
        return CostCurve(self.sizes[:count], measured, self._grid, self._context_ms)

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def ms(self, tokens: int, contexts: int = 0) -> float:
        """Return the milliseconds of one forward.

        `contexts`: tokens of earlier forwards that each of its tokens attends to, summed up.
        """
        return self._ms[self._index(tokens)] + self._context_ms * contexts

    def prompt_ms(self, tokens: int, start: int = 0) -> float:
        """Return the milliseconds of `tokens` of one prompt after the first `start` ones, cut where `cut` says."""
        if tokens <= self.largest and self.cut(tokens) == tokens:
            return self.ms(tokens, start * tokens)
        return self._cut_ms(tokens) + self._context_ms * start * tokens

    def cut(self, tokens: int, passing: float | None = None, waiting: int = 0) -> int:
        """Return the length of the next chunk of a prompt that has `tokens` left.

        Args:
            passing: shorter prompts that arrive per millisecond; None: one during the prompt's forwards.
            waiting: prompts that wait for this one.
        """
        if tokens <= self.step:
            return tokens
        fits = min(tokens, self.largest)
        whole = self.ms(fits)
        longer = self._cut_ms(fits) - whole
        # A prompt that arrives waits for half of the running forward on average. Cutting pays if that wait becomes
        # shorter by more than this prompt becomes longer. Below two steps it hardly ever pays.
        arriving = 1.0 if passing is None else passing * whole
        gained = arriving * (whole - self.ms(self.step)) / 2 if tokens >= 2 * self.step else 0.0
        return self.step if longer * (1 + waiting) <= gained else fits

    def _cut_ms(self, tokens: int) -> float:
        """Return the milliseconds of a prompt in chunks of `step` tokens."""
        whole, rest = divmod(tokens, self.step)
        # The context of each chunk: 0, step, 2 * step ...
        contexts = self.step * self.step * whole * (whole - 1) // 2 + whole * self.step * rest
        last = self.ms(rest) if rest else 0.0
        return whole * self.ms(self.step) + last + self._context_ms * contexts

    def learn(self, tokens: int, contexts: int, ms: float) -> None:
        """Learn from the measured time of one forward.

        If context takes a large part of that time, the cost of context is adjusted. Otherwise the times of the sizes
        within a factor of two are, those of nearer sizes more. A short forward after a long prefix says little about
        context: any error of its size's time would count as a large error per token of context.
        """
        if self._first_context_ms * contexts >= CONTEXT_PART * self.ms(tokens):
            self._learn_context(contexts, ms - self.ms(tokens))
            return
        expected = self.ms(tokens, contexts)
        change = math.log(_near(ms, expected) / expected)
        at = self._logs[self._index(tokens)]
        for index, log in enumerate(self._logs):
            weight = 1.0 - abs(log - at)
            if weight > 0.0:
                self._ms[index] *= math.exp(LEARNING * weight * change)
        self.step = self._choose_step()

    def _learn_context(self, contexts: int, spent: float) -> None:
        """Adjust the cost of context within CONTEXT_RANGE of the first one. `spent`: its milliseconds, as measured."""
        nearer = _near(spent / contexts, self._context_ms)
        learnt = self._context_ms + LEARNING * (nearer - self._context_ms)
        first = self._first_context_ms
        self._context_ms = min(max(learnt, first / CONTEXT_RANGE), first * CONTEXT_RANGE)

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
