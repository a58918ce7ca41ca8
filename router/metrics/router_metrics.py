"""/metrics: the router's own series, and those that nodes report by heartbeat, under vLLM's names where it has one.

There is one registry per process. Node series are read from the node registry at scrape time; nothing is observed per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import Metric

from common.messages.identity import Role
from router.metrics.exposition import Exposition
from router.metrics.graph_series import graph_series
from router.metrics.histogram import LoopHistogram
from router.metrics.node_series import RouterCounts, missing_series, node_series
from router.metrics.placement_metrics import PlacementMetrics, condition_series
from router.metrics.rank_series import rank_series
from router.metrics.request_series import FIRST_TOKEN_SECONDS, RequestFigures, RequestSeries
from router.metrics.timeline import Timeline
from router.nodes.health import Condition
from router.nodes.registry import Node

# Nodes whose series are made together: the largest family of one has some twenty samples.
NODES_AT_ONCE = 8


class RouterMetrics:
    """The router's own metrics in a registry, and the series of the nodes, which are made at scrape time."""

    def __init__(
        self,
        model_name: str,
        nodes: Callable[[], Iterable[Node]],
        refused: Callable[[], int],
        conditions: Callable[[Iterable[Node]], Iterable[Condition]],
        max_model_len: int,
        traced: Callable[[Timeline, RequestFigures], None],
        configured: Mapping[Role, Sequence[str]],
    ) -> None:
        """
        Args:
            nodes: returns those that are registered at that moment.
            refused: returns how many messages of nodes the router itself has refused so far.
            traced: takes every request that is over.
            configured: names and patterns of the nodes of the cluster file.
        """
        self._traced = traced
        self._nodes = nodes
        self._refused = refused
        self._conditions = conditions
        self._configured = configured
        self._model = model_name
        self.registry = CollectorRegistry()
        self._requests = RequestSeries(model_name, max_model_len, self.registry)
        queue = "From the arrival of a prompt at its prefill node to its first forward"
        self.prefill_queue = LoopHistogram(
            "tandem_prefill_queue_seconds",
            queue,
            {"model_name": model_name},
            FIRST_TOKEN_SECONDS,
            self.registry,
        )
        self._errors = Counter(
            "tandem_request_errors", "Requests by error", ("code",), registry=self.registry
        )
        self.retries = Counter(
            "tandem_retries", "Requests placed again, by cause", ("code",), registry=self.registry
        )
        self.placement = PlacementMetrics(self.registry)
        ProcessCollector(registry=self.registry)

    def request_finished(self, timeline: Timeline, figures: RequestFigures) -> None:
        """Observe a request once, when it is over."""
        self._requests.finished(timeline, figures)
        self._traced(timeline, figures)
        if not timeline.completed:
            self._errors.labels(timeline.outcome.removeprefix("error: ").replace(" ", "_")).inc()

    def request_refused(self, code: str) -> None:
        """Count a request that was refused before it began; `request_finished` is not called for it."""
        self._errors.labels(code).inc()

    def of_nodes(self, nodes: Sequence[Node], own: RouterCounts | None) -> Iterator[Metric]:
        """Yield the series of some nodes, with those that the router itself adds to them if `own` is given."""
        yield from node_series(self._model, nodes, own)
        yield from graph_series(self._model, nodes)
        yield from rank_series(self._model, nodes)

    def of_placement(self, nodes: Sequence[Node]) -> Iterator[Metric]:
        """Yield how placement sees all nodes, and which ones it misses."""
        yield from condition_series(self._model, self._conditions(nodes))
        yield from missing_series(self._model, nodes, self._configured)

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all series and their media type, which `accept`, the client's header, decides. See Exposition."""
        shown = Exposition(accept)
        await shown.add(self.registry.collect())
        nodes, own = list(self._nodes()), RouterCounts(self._refused(), self.placement.waiting)
        for start in range(0, max(len(nodes), 1), NODES_AT_ONCE):
            some = nodes[start : start + NODES_AT_ONCE]
            await shown.add(self.of_nodes(some, None if start else own))
        await shown.add(self.of_placement(nodes))
        return shown.finished()
