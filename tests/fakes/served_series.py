"""The names of all series that a router serves."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from router.metrics.http_metrics import HttpMetrics
from router.metrics.router_metrics import RouterMetrics
from tests.fakes.observing import router_metrics

SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def served_series() -> set[str]:
    """Return the names of all series, with and without values."""
    metrics = router_metrics(list)
    registry: CollectorRegistry = metrics.registry
    HttpMetrics(registry)
    families: list[Metric] = [*registry.collect(), *metrics.of_nodes([], None), *metrics.of_placement([])]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def rendered(metrics: RouterMetrics, accept: str = "") -> tuple[bytes, str]:
    """Return what /metrics answers and its media type, without an event loop."""
    rendering = metrics.render(accept)
    try:
        while True:
            rendering.send(None)
    except StopIteration as end:
        answer: tuple[bytes, str] = end.value
        return answer
