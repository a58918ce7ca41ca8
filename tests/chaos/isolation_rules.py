"""Invariant I6: a request unaffected by faults ends without error, with token gaps as in the undisturbed cluster."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.history import History
from tests.chaos.load import Exchange
from tests.chaos.progress_rules import Starved, impaired_parts, starvation_of
from tests.chaos.timeline import Interval
from tests.chaos.violation import Violation

# Seconds: a fault may be noticed this long after it ended (the bound for hangs and partitions is 3 s).
BEFORE = 4.0
FEWEST = 200  # gaps between tokens needed for a meaningful 99th percentile
FACTOR, ALLOWANCE = 3.0, 0.1  # times the undisturbed 99th percentile, plus seconds


@dataclass(frozen=True)
class Gaps:
    """Seconds between stream events, minus the time in which the machine ran other processes: p99 and count."""

    p99: float
    count: int


def check(history: History) -> list[Violation]:
    impaired = impaired_parts(history)
    pairs = placements(history)
    found = []
    for exchange in history.exchanges:
        if exchange.error_code is None or not exchange.ended:
            continue
        window = (exchange.sent - BEFORE, exchange.ended)
        if not _met(parts_of(exchange, pairs, history), impaired, window):
            text = (
                f"{exchange.request_id} ({exchange.case}) met no fault and ended with {exchange.error_code}"
            )
            found.append(Violation("I6", text))
    undisturbed, elsewhere = gaps(history)
    bound = FACTOR * undisturbed.p99 + ALLOWANCE
    if min(undisturbed.count, elsewhere.count) >= FEWEST and elsewhere.p99 > bound:
        text = f"99 % of {elsewhere.count} gaps between tokens that no fault touched are within {elsewhere.p99:.3f} s"
        found.append(Violation("I6", f"{text}, undisturbed {undisturbed.p99:.3f} s"))
    return found


def gaps(history: History) -> tuple[Gaps, Gaps]:
    """Return gaps (before the first fault, later while no fault affected a part of the request's pairs)."""
    impaired, starved, pairs = impaired_parts(history), starvation_of(history), placements(history)
    begun = history.run.get("begun", float("-inf"))
    undisturbed: list[float] = []
    elsewhere: list[float] = []
    for exchange in history.exchanges:
        if exchange.behaviour != "stays" or not exchange.streamed or not exchange.done:
            continue
        parts = parts_of(exchange, pairs, history)
        for since, until in pairwise(exchange.progress):
            if until < begun:
                undisturbed.append(_less(since, until, starved))
            elif not _met(parts, impaired, (since - BEFORE, until)):
                elsewhere.append(_less(since, until, starved))
    return _gaps(undisturbed), _gaps(elsewhere)


def placements(history: History) -> dict[str, set[str]]:
    """Return request -> pairs on which it was placed."""
    names = {each["incarnation"]: each["node"] for each in history.events if each["event"] == "start"}
    pairs: dict[str, set[str]] = defaultdict(set)
    for event in history.events:
        if event["event"] == "placed":
            pairs[event["request"]].add(
                "/".join(names.get(event[role], "?") for role in ("prefill", "decode"))
            )
    return pairs


def parts_of(exchange: Exchange, pairs: dict[str, set[str]], history: History) -> set[str]:
    """Return the parts that a request needed.

    A request without a placement found every pair unreachable, so any fault may explain that.
    """
    used = pairs.get(exchange.request_id) or set(history.run["pairs"])
    return {part for pair in used for part in history.run["pairs"].get(pair, ())}


def _met(parts: set[str], impaired: dict[str, list[Interval]], window: Interval) -> bool:
    return any(
        since <= window[1] and until >= window[0] for part in parts for since, until in impaired.get(part, ())
    )


def _less(since: float, until: float, starved: list[Starved]) -> float:
    return max(0.0, until - since - sum(each.within((since, until)) for each in _near(since, until, starved)))


def _near(since: float, until: float, starved: list[Starved]) -> Iterator[Starved]:
    """Return those of `starved`, which are ordered and disjoint, that touch the interval."""
    at = bisect_left(starved, since, key=lambda each: each.until)
    while at < len(starved) and starved[at].since < until:
        yield starved[at]
        at += 1


def _gaps(seconds: list[float]) -> Gaps:
    ordered = sorted(seconds)
    return Gaps(ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0.0, len(ordered))
