"""Logs the throughput of the whole cluster, from the counters that the nodes report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.observability.logs import Log
from common.observability.throughput import Activity, ThroughputLog, kv_usage, sum_of, totals_of
from router.nodes.registry import Node


class ClusterThroughput:
    """Logs the tokens per second of all nodes together while they are under load."""

    def __init__(
        self, log: Log, clock: Callable[[], float], nodes: Iterable[Node], waiting: Callable[[], int]
    ) -> None:
        """`nodes`: those that are registered whenever it is iterated. `waiting`: requests that wait at the router."""
        self._clock = clock
        self._nodes = nodes
        self._waiting = waiting
        self._lines = ThroughputLog(log, clock)

    def log_if_due(self) -> None:
        """Log a line if one is due."""
        self._lines.log_if_due(self._clock(), self._activity)

    def _activity(self) -> Activity:
        activity = sum_of(_activity_of(node) for node in self._nodes)
        return activity._replace(queued=activity.queued + self._waiting())


def _activity_of(node: Node) -> Activity:
    totals, load = totals_of(node.counters), node.load
    if node.role == "decode":
        # Prompts count on their prefill nodes.
        totals = totals._replace(prompt=0, cached=0)
    return Activity(totals, load.running, load.queued, kv_usage(load))
