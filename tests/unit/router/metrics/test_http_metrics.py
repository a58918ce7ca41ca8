"""Series of HTTP requests: labels that no client can add values to."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from common.observability.logs import Log
from router.http.error_log import ErrorLog
from router.http.errors import error_middleware
from router.metrics.http_metrics import HttpMetrics


async def test_labels_are_routes_known_methods_and_classes_of_statuses() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.query.get("status", 200)))

    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    app = web.Application(
        middlewares=[error_middleware(Log("test"), ErrorLog(Log("test")), metrics.answered)]
    )
    app.router.add_get("/v1/models/{id:.+}", answer)
    app.router.add_get("/health", answer)
    async with TestClient(TestServer(app)) as client:
        for asked in ("a", "b", "b?status=204", "c?status=503"):
            await client.get(f"/v1/models/{asked}")
        await client.get("/health")
        await client.get("/no/such/path")
        await client.request("PROPFIND", "/no/such/path")
        await client.post("/v1/models/a")
    found = {tuple(labels): count for labels, count in samples(registry, "http_requests_total")}
    assert found == {
        ("/v1/models/{id}", "GET", "2xx"): 3,
        ("/v1/models/{id}", "GET", "5xx"): 1,
        ("none", "GET", "4xx"): 1,
        ("none", "POST", "4xx"): 1,
        ("none", "other", "4xx"): 1,
    }
    seconds = dict(samples(registry, "http_request_duration_seconds_count"))
    assert sum(seconds.values()) == 7


def samples(registry: CollectorRegistry, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
    families: Iterator[Metric] = iter(registry.collect())
    for family in families:
        for sample in family.samples:
            if sample.name == name:
                yield tuple(sample.labels.values()), sample.value
