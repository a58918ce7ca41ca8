"""I6: a request that met no fault ends without an error."""

from __future__ import annotations

from collections import defaultdict

from tests.chaos.history import History
from tests.chaos.progress_rules import impaired_parts
from tests.chaos.violation import Violation

BEFORE = (
    4.0  # seconds: a fault that has ended may be noticed so late (the bound for hangs and partitions is 3 s)
)


def check(history: History) -> list[Violation]:
    impaired = impaired_parts(history)
    names = {each["incarnation"]: each["node"] for each in history.events if each["event"] == "start"}
    pairs: dict[str, set[str]] = defaultdict(set)  # request -> pairs that it was placed on
    for event in history.events:
        if event["event"] == "placed":
            chosen = [names.get(event[role], "?") for role in ("prefill", "decode")]
            pairs[event["request"]].add("/".join(chosen))
    found = []
    for exchange in history.exchanges:
        if exchange.error_code is None or not exchange.ended:
            continue
        # without a placement every pair had to be out of reach, so a fault of any part explains it
        used = pairs.get(exchange.request_id) or set(history.run["pairs"])
        parts = {part for pair in used for part in history.run["pairs"].get(pair, ())}
        met = any(
            since <= exchange.ended and until >= exchange.sent - BEFORE
            for part in parts
            for since, until in impaired.get(part, ())
        )
        if not met:
            text = (
                f"{exchange.request_id} ({exchange.case}) met no fault and ended with {exchange.error_code}"
            )
            found.append(Violation("I6", text))
    return found
