"""Series of HTTP requests, under the names that vLLM's server has. Probes and scrapes are not counted."""

from __future__ import annotations

import time
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.observability.histogram import Histogram
from router.http.errors import arrived_key
from router.http.matched_route import PROBES, matched_route
from router.metrics.histogram import bucket_rows

SECONDS = (0.1, 0.5, 1)
NONE = "none"  # the handler of paths that no route serves
UNCOUNTED = PROBES | {"/metrics", "/load", "/v1/loads", "/get_load", "/server_info", "/get_server_info"}
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class HttpMetrics(Collector):
    """Counts answers by route, method and class of status: labels whose values no client can add to."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers: dict[tuple[str, str, str], int] = {}  # (handler, method, status)
        self._seconds: dict[tuple[str, str], Histogram] = {}  # (handler, method)
        registry.register(self)

    def answered(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count an answer after its last byte."""
        handler = matched_route(request) or NONE
        if handler in UNCOUNTED:
            return
        method = request.method if request.method in METHODS else "other"
        key = (handler, method, f"{response.status // 100}xx")
        self._answers[key] = self._answers.get(key, 0) + 1
        seconds = self._seconds.get(key[:2])
        if seconds is None:
            seconds = self._seconds[key[:2]] = Histogram(SECONDS)
        seconds.observe(time.monotonic() - request[arrived_key])

    def collect(self) -> Iterator[Metric]:
        labels = ("handler", "method")
        answers = CounterMetricFamily("http_requests", "HTTP requests by status", labels=(*labels, "status"))
        for key, count in self._answers.items():
            answers.add_metric(key, count)
        yield answers
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Until the last byte of the answer", labels=labels
        )
        for route, histogram in self._seconds.items():
            seconds.add_metric(route, bucket_rows(histogram.bounds, histogram.counts), histogram.sum)
        yield seconds
