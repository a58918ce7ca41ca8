"""A line in the log every ten seconds while a process has load, with the figures that vLLM's engines log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from common.messages.identity import NodeCounters, NodeLoad
from common.observability.logs import Log

INTERVAL: Final = 10.0  # seconds


class Totals(NamedTuple):
    """Tokens since the start of a process."""

    prompt: int = 0
    cached: int = 0  # of `prompt`
    generated: int = 0
    drafts: int = 0  # steps that verified drafts
    accepted: int = 0  # draft tokens


class Activity(NamedTuple):
    """The activity of a process at one moment."""

    totals: Totals
    running: int
    queued: int
    kv_usage: float  # 0 to 1


class ThroughputLog:
    """Logs the rates since the last line. Without load it logs nothing."""

    def __init__(self, log: Log, clock: Callable[[], float]) -> None:
        self._log = log
        self._since = clock()
        self._before = Totals()

    def log_if_due(self, now: float, activity: Callable[[], Activity]) -> None:
        """Log a line if one is due. Called often; `activity` is called only then."""
        seconds = now - self._since
        if seconds < INTERVAL:
            return
        current = activity()
        # Fewer than before: a process was replaced, and counts from 0.
        gained = Totals(*(max(new - old, 0) for new, old in zip(current.totals, self._before, strict=True)))
        self._since, self._before = now, current.totals
        if not (any(gained) or current.running or current.queued):
            return
        figures = {
            "prompt_tokens_per_s": round(gained.prompt / seconds, 1),
            "generated_tokens_per_s": round(gained.generated / seconds, 1),
            "running": current.running,
            "queued": current.queued,
            "kv_usage": round(current.kv_usage, 3),
        }
        if gained.prompt:
            figures["prefix_hit_rate"] = round(gained.cached / gained.prompt, 3)
        if gained.drafts:
            figures["accept_length"] = round(1 + gained.accepted / gained.drafts, 3)
        self._log.info("throughput", **figures)


def totals_of(counters: NodeCounters) -> Totals:
    """Return the tokens that a node has counted."""
    return Totals(
        counters.prompt_tokens,
        counters.cached_tokens,
        counters.generated_tokens,
        counters.spec_drafts,
        counters.spec_accepted_tokens,
    )


def sum_of(activities: Iterable[Activity]) -> Activity:
    """Return the activity of several processes together; the usage is that of the fullest one."""
    totals, running, queued, usage = Totals(), 0, 0, 0.0
    for activity in activities:
        totals = Totals(*map(sum, zip(totals, activity.totals, strict=True)))
        running, queued = running + activity.running, queued + activity.queued
        usage = max(usage, activity.kv_usage)
    return Activity(totals, running, queued, usage)


def kv_usage(load: NodeLoad) -> float:
    """Return the share of pages that are neither free nor owned only by the prefix cache, 0 to 1."""
    return 1 - (load.free_pages + load.cached_pages) / load.total_pages if load.total_pages else 0.0
