"""Series about placement: requests that waited for a role or were refused, retries, breakers and weights."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class PlacementMetrics:
    """Counters that the dispatcher increments."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.waited = counter(
            "tandem_requests_without_node", "Requests that found no node of a role at first", "role"
        )
        self.refused = counter(
            "tandem_requests_refused_without_node", "Requests that were refused for want of a role", "role"
        )
