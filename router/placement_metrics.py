"""Series about placement: requests that wait for room or a role or were refused, retries, breakers and weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric

from router.node_health import Condition


class PlacementMetrics:
    """Counters that the dispatcher increments, and a gauge that reads its queue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.waited = counter(
            "tandem_requests_without_node", "Requests that found no node of a role at first", "role"
        )
        self.refused = counter(
            "tandem_requests_refused_without_node", "Requests that were refused for want of a role", "role"
        )
        self.over_budget = counter(
            "tandem_retries_over_budget", "Requests that were refused a retry because there are too many"
        )
        self.quarantined = counter("tandem_requests_quarantined", "Requests that crashed node after node")
        self.waiting = Gauge(
            "tandem_requests_waiting_for_room",
            "Requests that wait at the router until decode nodes have room",
            registry=registry,
        )


def condition_series(model: str, conditions: Iterable[Condition]) -> Iterator[Metric]:
    """What placement thinks of each node."""
    names = ("model_name", "engine", "role")
    weight = GaugeMetricFamily("tandem_node_weight", "Share of requests compared with weight 1", labels=names)
    breaker = GaugeMetricFamily("tandem_node_breaker_open", "1 unless the breaker is closed", labels=names)
    speed = GaugeMetricFamily("tandem_node_seconds_per_token", "As requests measured it", labels=names)
    bad = GaugeMetricFamily("tandem_pair_bad", "Pairs that placement avoids", labels=("prefill", "decode"))
    for each in conditions:
        values = (model, each.node.name, each.node.role)
        weight.add_metric(values, each.weight)
        breaker.add_metric(values, float(each.breaker != "closed"))
        if each.seconds_per_token is not None:
            speed.add_metric(values, each.seconds_per_token)
        if each.node.role == "prefill":
            for peer in each.bad_peers:
                bad.add_metric((each.node.name, peer), 1.0)
    yield from (weight, breaker, speed, bad)
