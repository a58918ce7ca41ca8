"""Invariant I4: nothing waits longer than the bound while a pair of nodes with working links is healthy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tests.chaos.history import History
from tests.chaos.load import Exchange
from tests.chaos.timeline import Interval, healthy_stretches
from tests.chaos.violation import Violation

HANG = 5.0  # seconds without a token or an answer


@dataclass(frozen=True)
class Starved:
    """An interval of which the machine spent `seconds` without running what was ready."""

    since: float
    until: float
    seconds: float

    def within(self, window: Interval) -> float:
        overlap = min(self.until, window[1]) - max(self.since, window[0])
        return max(0.0, overlap) / (self.until - self.since) * self.seconds


def starvation_of(history: History) -> list[Starved]:
    return [
        Starved(note["since"], note["until"], note["seconds"])
        for note in history.faults
        if note["event"] == "starved"
    ]


def check(history: History, bound: float = HANG) -> list[Violation]:
    impaired = impaired_parts(history)
    starved = starvation_of(history)
    pairs = {name: _of_parts(parts, impaired) for name, parts in history.run["pairs"].items()}
    told = _deliveries(history)
    found = []
    for exchange in history.exchanges:
        for window in pairwise(_marks(exchange, told.get(exchange.request_id, []))):
            if window[1] - window[0] <= bound:
                continue
            pair, longest = max(
                ((name, _longest(intervals, window, starved)) for name, intervals in pairs.items()),
                key=lambda each: each[1],
            )
            if longest > bound:
                text = (
                    f"{exchange.request_id} ({exchange.case}): nothing for {window[1] - window[0]:.1f} s from "
                    f"t={window[0]:.2f}; {pair} was healthy for {longest:.1f} s of it"
                )
                found.append(Violation("I4", text))
                break
    return found


def longest_gap(history: History) -> float:
    """Return the longest gap of all exchanges, including faults and starvation."""
    told = _deliveries(history)
    return max(
        (
            until - since
            for exchange in history.exchanges
            for since, until in pairwise(_marks(exchange, told.get(exchange.request_id, [])))
        ),
        default=0.0,
    )


def _marks(exchange: Exchange, told: list[float]) -> list[float]:
    """Return the times of progress, as seen by the client or the router."""
    seen = [each for each in (*exchange.progress, *told) if exchange.sent <= each <= exchange.ended]
    return sorted([exchange.sent, *seen, exchange.ended])


def _longest(intervals: list[Interval], window: Interval, starved: list[Starved]) -> float:
    """Return the longest healthy stretch in seconds, minus the time in which the machine ran other processes."""
    return max(
        (
            until - since - sum(each.within((since, until)) for each in starved)
            for since, until in healthy_stretches(intervals, window)
        ),
        default=0.0,
    )


def _of_parts(parts: list[str], impaired: dict[str, list[Interval]]) -> list[Interval]:
    return [interval for part in parts for interval in impaired.get(part, ())]


def impaired_parts(history: History) -> dict[str, list[Interval]]:
    """Return part (process or link) -> intervals in which a fault affected it."""
    begun: dict[str, tuple[float, list[str]]] = {}
    found: dict[str, list[Interval]] = {}
    for note in history.faults:
        if note["event"] == "begin":
            begun[note["fault"]] = (note["t"], note["parts"])
        elif note["event"] == "end":
            since, parts = begun.pop(note["fault"])
            for part in parts:
                found.setdefault(part, []).append((since, note["t"]))
    for since, parts in begun.values():
        for part in parts:
            found.setdefault(part, []).append((since, float("inf")))
    return found


def _deliveries(history: History) -> dict[str, list[float]]:
    """Return request -> times at which the router passed data to its writer.

    Clients of whole answers cannot see them.
    """
    told: dict[str, list[float]] = {}
    for event in history.events:
        if event["event"] == "delivered":
            told.setdefault(event["request"], []).append(event["t"])
    return told
