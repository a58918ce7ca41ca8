"""Series of the captured graphs of the nodes. The label `model` is target, draft, or one of several drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages.identity import GraphTotals
from router.metrics.node_series import LABELS
from router.nodes.registry import Node

COUNTERS: dict[str, tuple[str, Callable[[GraphTotals], float]]] = {
    "tandem_graph_replays": ("Forwards that replayed a captured graph", lambda g: g.replays),
    "tandem_graph_live_tokens": ("Tokens computed in replays", lambda g: g.live_tokens),
    "tandem_graph_padded_tokens": (
        "Padding tokens computed in replays and discarded",
        lambda g: g.padded_tokens,
    ),
}
GAUGES: dict[str, tuple[str, Callable[[GraphTotals], float]]] = {
    "tandem_graphs_captured": ("Captured graphs of a forward", lambda g: g.captured),
    "tandem_graphs_unused": ("Graphs that no batch has replayed yet", lambda g: g.unused),
}


def graph_series(model: str, nodes: Iterable[Node]) -> Iterator[Metric]:
    """Yield the series of every forward that may be captured."""
    found = [
        ((model, node.name, node.role, totals.phase, totals.model), totals)
        for node in nodes
        for totals in node.counters.graphs
    ]
    labels = (*LABELS, "phase", "model")
    for name, (text, of_totals) in COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, totals in found:
            counter.add_metric(values, of_totals(totals))
        yield counter
    fallbacks = CounterMetricFamily(
        "tandem_graph_fallbacks", "Forwards that ran eagerly, by reason", labels=(*labels, "reason")
    )
    for values, totals in found:
        for reason, count in totals.fallbacks.items():
            fallbacks.add_metric((*values, reason), count)
    yield fallbacks
    for name, (text, of_totals) in GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=labels)
        for values, totals in found:
            gauge.add_metric(values, of_totals(totals))
        yield gauge
