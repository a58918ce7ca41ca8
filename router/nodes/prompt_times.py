"""Predicts how long a prefill node computes a prompt, from the times that the node reports with its load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

import msgspec

UNKNOWN_MS = 0.1  # per token, for a node that has reported nothing yet
_TOKENS = itemgetter(0)


class PromptTime(msgspec.Struct, frozen=True):
    """Milliseconds that a node computes one prompt."""

    alone: float  # in forwards of its own
    shared: float  # what it adds to forwards that it shares with other prompts


NO_TIME = PromptTime(0.0, 0.0)


def prompt_time(times: Sequence[tuple[int, float]], tokens: int, cached: int = 0) -> PromptTime:
    """Return the times of a prompt; for the arguments see `rest_ms`.

    A node packs the short prompts of its queue into forwards of the length at which a token takes the least time, so
    each adds its tokens at that rate. Longer prompts have forwards of their own.
    """
    alone = rest_ms(times, tokens, cached)
    rate, length = best_rate(times)
    rest = tokens - cached
    return PromptTime(alone, min(alone, rate * rest) if rest < length else alone)


def best_rate(times: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """Return (milliseconds of a token, length of a prompt) at the length at which a token takes the least time."""
    rates = [(max(ms, 0.0) / length, length) for length, ms in times if length > 0]
    return min(rates, default=(UNKNOWN_MS, 0))


def rest_ms(times: Sequence[tuple[int, float]], tokens: int, cached: int) -> float:
    """Return the milliseconds of a prompt's forwards if its first `cached` tokens, fewer than all, are in the cache.

    The rest attends to the cached tokens too, which is why it takes at least what they save of the whole prompt.
    """
    if cached <= 0:
        return prompt_ms(times, tokens)
    return max(prompt_ms(times, tokens) - prompt_ms(times, cached), prompt_ms(times, tokens - cached))


def prompt_ms(times: Sequence[tuple[int, float]], tokens: int) -> float:
    """Return the milliseconds of a prompt's forwards, without a cached prefix.

    Args:
        times: (tokens, milliseconds) of some lengths, ascending; lengths in between are interpolated.
    """
    return max(_interpolated(times, tokens), 0.0)


def _interpolated(times: Sequence[tuple[int, float]], tokens: int) -> float:
    index = bisect_left(times, tokens, key=_TOKENS)
    if index < len(times) and (index == 0 or times[index][0] == tokens):
        return times[index][1]
    if not times:
        return UNKNOWN_MS * tokens
    if index == len(times):
        longest, ms = times[-1]
        return ms * tokens / max(longest, 1)
    (low, low_ms), (high, high_ms) = times[index - 1], times[index]
    return low_ms + (high_ms - low_ms) * (tokens - low) / (high - low)
