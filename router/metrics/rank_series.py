"""Series of the ranks of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages.identity import RankReport, RankTotals
from router.metrics.node_series import LABELS
from router.nodes.registry import Node

GAUGES: dict[str, tuple[str, Callable[[RankReport], float]]] = {
    "tandem_rank_memory_bytes": (
        "Memory of a rank's device at the node's start; on a CPU resident memory",
        lambda r: r.memory_bytes,
    ),
    "tandem_rank_pool_bytes": ("Memory of a rank's share of the KV pool", lambda r: r.pool_bytes),
}
COUNTERS: dict[str, tuple[str, Callable[[RankTotals], float]]] = {
    "tandem_rank_plans": ("Plans that a rank has applied", lambda r: r.plans),
    "tandem_rank_collective_wait_seconds": (
        "Time in which a rank's host has waited for the other ranks",
        lambda r: r.collective_wait_seconds,
    ),
}


def rank_series(model: str, nodes: Iterable[Node]) -> Iterator[Metric]:
    """Yield the memory of every rank, and for nodes of several ranks the progress of each."""
    labels = (*LABELS, "rank")
    labelled = [((model, node.name, node.role), node) for node in nodes]
    for name, (text, of_report) in GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, node in labelled:
            for rank, report in enumerate(node.register.ranks):
                gauge.add_metric((*values, str(rank)), of_report(report))
        yield gauge
    behind = GaugeMetricFamily("tandem_rank_plans_behind", "Plans not applied yet", labels=labels)
    found = [
        ((*values, str(rank)), totals)
        for values, node in labelled
        for rank, totals in enumerate(node.counters.ranks)
    ]
    for name, (text, of_totals) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for of_rank, totals in found:
            counter.add_metric(of_rank, of_totals(totals))
        yield counter
    for of_rank, totals in found:
        behind.add_metric(of_rank, totals.behind)
    yield behind
