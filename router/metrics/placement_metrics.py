"""Metrics of placement: requests that wait or are refused, retries, breakers and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric

from router.metrics.node_series import LABELS
from router.nodes.health import Condition


class PlacementMetrics:
    """Counters that the dispatcher increments, and a gauge of its queue length."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.waited = counter(
            "tandem_requests_without_node", "Requests that had to wait for a node of a role", "role"
        )
        self.refused = counter(
            "tandem_requests_refused_without_node",
            "Requests refused because no node of a role was available",
            "role",
        )
        self.over_budget = counter(
            "tandem_retries_over_budget", "Requests whose retry was refused by the retry budget"
        )
        self.quarantined = counter(
            "tandem_requests_quarantined", "Requests quarantined because they crash nodes"
        )
        self.refused_busy = counter(
            "tandem_requests_refused_busy", "Requests refused because all nodes of a role were busy"
        )
        self.expected_cached = counter(
            "tandem_placement_expected_cached_tokens",
            "Prompt tokens that placement believed to be cached on the chosen prefill node",
        )
        self.found_cached = counter(
            "tandem_placement_found_cached_tokens",
            "Prompt tokens that were cached there when they were computed",
        )
        self.known_blocks = Gauge(
            "tandem_placement_known_blocks",
            "Blocks of prompts that placement knows to be on nodes",
            registry=registry,
        )
        self.followed_nodes = Gauge(
            "tandem_placement_followed_nodes",
            "Nodes whose KV events placement has heard without a gap",
            registry=registry,
        )
        self.event_gaps = counter(
            "tandem_placement_event_gaps", "Times that KV events of a node were missing and asked for again"
        )
        self._waiting: Callable[[], int] = lambda: 0
        self._waiting_series = Gauge(
            "tandem_requests_waiting_for_room",
            "Requests that wait at the router for capacity of the decode nodes",
            registry=registry,
        )

    @property
    def waiting(self) -> int:
        """Requests that wait at the router for capacity of the decode nodes."""
        return self._waiting()

    def count_waiting(self, waiting: Callable[[], int]) -> None:
        """Let `waiting` count the requests that wait at the router."""
        self._waiting = waiting
        self._waiting_series.set_function(waiting)


def condition_series(model: str, conditions: Iterable[Condition]) -> Iterator[Metric]:
    """Yield the series of each node's placement condition."""
    weight = GaugeMetricFamily(
        "tandem_node_weight", "Share of requests relative to a node of weight 1", labels=LABELS
    )
    breaker = GaugeMetricFamily("tandem_node_breaker_open", "1 unless the breaker is closed", labels=LABELS)
    speed = GaugeMetricFamily(
        "tandem_node_seconds_per_token", "Seconds per token, measured on requests", labels=LABELS
    )
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
