"""/metrics: the router's own series and those that nodes report with heartbeats, under vLLM's names where vLLM has one.

There is one registry per process. Node series are read from the node registry at scrape time; nothing is observed per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from router.metrics.graph_series import graph_series
from router.metrics.histogram import LoopHistogram
from router.metrics.node_series import node_series
from router.metrics.placement_metrics import PlacementMetrics, condition_series
from router.metrics.rank_series import rank_series
from router.metrics.request_series import FIRST_TOKEN_SECONDS, RequestFigures, RequestSeries
from router.metrics.timeline import Timeline
from router.nodes.health import Condition
from router.nodes.registry import Node

OPENMETRICS = "application/openmetrics-text"
MAX_MODEL_LEN = 1 << 20  # of histograms of tokens, unless a model is known


class RouterMetrics(Collector):
    """The router's metrics registry. `nodes` returns the nodes that are registered at that moment."""

    def __init__(
        self,
        model_name: str,
        nodes: Callable[[], Iterable[Node]],
        refused: Callable[[], int],
        conditions: Callable[[Iterable[Node]], Iterable[Condition]] = lambda nodes: (),
        max_model_len: int = MAX_MODEL_LEN,
        traced: Callable[[Timeline, RequestFigures], None] = lambda timeline, figures: None,
    ) -> None:
        """
        Args:
            refused: returns how many messages of nodes the router itself has refused so far.
            traced: takes every request that is over.
        """
        self._traced = traced
        self._nodes = nodes
        self._refused = refused
        self._conditions = conditions
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
        self.registry.register(self)

    def request_finished(self, timeline: Timeline, figures: RequestFigures) -> None:
        """Observe a request once, when it is over."""
        self._requests.finished(timeline, figures)
        self._traced(timeline, figures)
        if not timeline.completed:
            self._errors.labels(timeline.outcome.removeprefix("error: ").replace(" ", "_")).inc()

    def request_refused(self, code: str) -> None:
        """Count a request that was refused before it began; `request_finished` is not called for it."""
        self._errors.labels(code).inc()

    def collect(self) -> Iterator[Metric]:
        nodes = list(self._nodes())
        yield from node_series(self._model, nodes, self._refused(), self.placement.waiting)
        yield from graph_series(self._model, nodes)
        yield from rank_series(self._model, nodes)
        yield from condition_series(self._model, self._conditions(nodes))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all series and their media type, which `accept`, the client's header, decides.

        It is OpenMetrics if the client names that, otherwise Prometheus's text format.
        """
        if OPENMETRICS in accept:
            # With its default escaping, prometheus_client writes "_" for the ":" in the names of samples.
            shown: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self.registry, escaping=openmetrics.ALLOWUTF8
            )
            return shown, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
