"""Invariant I7: throughput recovers by itself. Compares batches of the same requests before and after the faults."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tests.chaos.history import History
from tests.chaos.progress_rules import starvation_of
from tests.chaos.violation import Violation

SHARE = 0.95  # share of the undisturbed throughput
WITHIN = 60.0  # seconds after the last fault was healed


@dataclass(frozen=True)
class Recovery:
    """`share`: best throughput reached in time. `seconds`: when SHARE was first reached, None if never."""

    undisturbed: float  # tokens per second
    share: float
    seconds: float | None


def check(history: History) -> list[Violation]:
    found = [Violation("I7", text) for text in history.run["not_recovered"]]
    recovery = measured(history)
    if recovery is not None and recovery.seconds is None:
        text = f"the throughput came back to {recovery.share:.0%} of {recovery.undisturbed:.0f} tokens/s only"
        found.append(Violation("I7", f"{text} within {WITHIN:g} s after the last fault"))
    return found


def measured(history: History) -> Recovery | None:
    """Measure the recovery; None for a run without batches."""
    run = history.run
    if not run.get("batches_before") or not run.get("batches_after"):
        return None
    starved = starvation_of(history)

    def rates(since: float, until: float, tokens: int) -> tuple[float, float]:
        """Return rates by the clock, and minus the time in which the machine did not run what was ready."""
        busy = until - since - sum(each.within((since, until)) for each in starved)
        return tokens / (until - since), tokens / max(busy, (until - since) / 10)

    before = [rates(*batch) for batch in run["batches_before"]]
    usual = [median(each[i] for each in before) for i in (0, 1)]
    best, reached = 0.0, None
    for batch in run["batches_after"]:
        if batch[0] - run["ended"] > WITHIN:
            break
        share = max(rate / known for rate, known in zip(rates(*batch), usual, strict=True))
        best = max(best, share)
        if share >= SHARE and reached is None:
            reached = round(batch[1] - run["ended"], 1)
    return Recovery(usual[0], best, reached)
