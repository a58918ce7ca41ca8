"""Decides how many prompts of an ordered queue share the next forward, so that first tokens come soonest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefill_node.cost_curve import CostCurve

# Prompts for which the cheapest division into forwards is searched, which takes time by the square of their number.
MAX_DIVIDED = 64


class Waiting(NamedTuple):
    """A prompt of the queue."""

    start: int  # tokens of it that are computed
    remaining: int


class Share(NamedTuple):
    """The content of a forward: all of the first `whole` prompts of the queue, then `part` tokens of the next one."""

    whole: int
    part: int = 0


def share(queue: Sequence[Waiting], curve: CostCurve, others: int = 0, passing: float | None = None) -> Share:
    """Return the forward after which the sum of the waits for first tokens is the lowest, for a queue in this order.

    Two prompts share a forward if that saves those after them more time than the first one loses by waiting for the
    other: where a forward's time does not depend on its size, or where the queue is very long. At most MAX_DIVIDED
    prompts share one whole.

    Args:
        others: prompts that wait, too, but are not in `queue`.
        passing: prompts shorter than the first one that arrive per millisecond; None: see `CostCurve.cut`.
    """
    if not queue:
        return Share(0)
    divided = queue[:MAX_DIVIDED]
    whole = 1 if len(queue) == 1 else _whole(divided, curve, len(queue) - len(divided) + others)
    if whole == 1:
        after = 0 if passing is None else len(queue) - 1 + others
        cut = curve.cut(queue[0].remaining, passing, after)
        if cut < queue[0].remaining:
            return Share(0, cut)
    return Share(whole, _part(queue, whole, curve, others) if whole < len(queue) else 0)


def _whole(queue: Sequence[Waiting], curve: CostCurve, others: int) -> int:
    """Return how many prompts share the first forward, by the cheapest division of the queue into forwards."""
    count = len(queue)
    after = [0.0] * (count + 1)  # after[i]: the sum of waits of prompts i.. that begins with a forward at i
    first = 1
    for begin in range(count - 1, -1, -1):
        waiting = count - begin + others
        head = queue[begin]
        least, first = waiting * curve.prompt_ms(head.remaining, head.start) + after[begin + 1], 1
        tokens, contexts = head.remaining, head.start * head.remaining
        for end in range(begin + 1, count):
            tokens += queue[end].remaining
            contexts += queue[end].start * queue[end].remaining
            spent = waiting * curve.ms(tokens, contexts)
            if tokens > curve.largest or spent >= least:
                break
            if spent + after[end + 1] < least:
                least, first = spent + after[end + 1], end + 1 - begin
        after[begin] = least
    return first


def _part(queue: Sequence[Waiting], whole: int, curve: CostCurve, others: int) -> int:
    """Return how many tokens of the next prompt share the forward.

    The forward becomes longer for all, and the next prompt's own shorter for all after it.
    """
    tokens = sum(each.remaining for each in queue[:whole])
    nearest, following = queue[whole], len(queue) - whole + others
    ms, alone = curve.ms(tokens), curve.prompt_ms(nearest.remaining, nearest.start)
    best, part = 0.0, 0
    for size in curve.sizes:
        added = size - tokens
        if added <= 0:
            continue
        if added >= nearest.remaining:
            break
        longer = curve.ms(size, nearest.start * added) - ms
        shorter = alone - curve.prompt_ms(nearest.remaining - added, nearest.start + added)
        gain = following * shorter - (whole + following) * longer
        if gain > best:
            best, part = gain, added
    return part
