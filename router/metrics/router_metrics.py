"""/metrics: the router's own series and those that nodes report with heartbeats, under vLLM's names where vLLM has one.

There is one registry per process. Node series are read from the registry at scrape time; nothing is observed per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages.generation import FINISH_LENGTH, FINISH_STOP
from common.messages.identity import GraphTotals, NodeCounters, NodeLoad, RankReport, RankTotals
from router.metrics.handover_metrics import HandoverMetrics
from router.metrics.histogram import LoopHistogram
from router.metrics.placement_metrics import PlacementMetrics, condition_series
from router.metrics.timeline import Timeline
from router.nodes.health import Condition
from router.nodes.registry import Node

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

GAUGES: dict[str, tuple[str, Callable[[NodeLoad], float]]] = {
    "vllm:num_requests_running": ("Requests in a batch", lambda load: load.running),
    "vllm:num_requests_waiting": ("Requests not started yet", lambda load: load.queued),
    "vllm:kv_cache_usage_perc": (
        "KV cache usage: pages neither free nor cached, 0 to 1",
        lambda load: (
            1 - (load.free_pages + load.cached_pages) / load.total_pages if load.total_pages else 0.0
        ),
    ),
    "tandem_transferring_requests": (
        "Requests in transfer",
        lambda load: load.transferring,
    ),
    "tandem_prefill_queue_ms": (
        "Predicted time until all prompts of the node are computed, in milliseconds",
        lambda load: load.queued_ms,
    ),
    "tandem_free_pages": ("Free KV pages", lambda load: load.free_pages),
    "tandem_cached_pages": ("KV pages owned by the prefix cache", lambda load: load.cached_pages),
    "tandem_quarantined_pages": ("KV pages that a peer may still write", lambda load: load.quarantined_pages),
    "tandem_total_pages": ("KV pages in total, without the padding page", lambda load: load.total_pages),
}

REFUSED = "tandem_refused_messages"  # the router also counts its own
COUNTERS: dict[str, tuple[str, Callable[[NodeCounters], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens received", lambda c: c.prompt_tokens),
    "vllm:generation_tokens": ("Tokens sampled", lambda c: c.generated_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up", lambda c: c.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found", lambda c: c.cached_tokens),
    "vllm:num_preemptions": ("Retractions", lambda c: c.retractions),
    "vllm:spec_decode_num_drafts": ("Steps of one request that verified drafts", lambda c: c.spec_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified", lambda c: c.spec_draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted", lambda c: c.spec_accepted_tokens),
    "tandem_forced_tokens": (
        "Tokens forced by grammars that were verified as drafts",
        lambda c: c.spec_forced_tokens,
    ),
    "tandem_accepted_forced_tokens": ("Forced tokens accepted", lambda c: c.spec_accepted_forced),
    "tandem_node_requests": ("Requests accepted", lambda c: c.requests),
    "tandem_steps": ("Forward launches", lambda c: c.steps),
    "tandem_forward_seconds": ("Device time of prompt forwards", lambda c: c.forward_seconds),
    "tandem_predicted_forward_seconds": (
        "What the node predicted for the same forwards; it plans by that",
        lambda c: c.predicted_forward_seconds,
    ),
    "tandem_late_launches": ("Steps before which the device had run out of work", lambda c: c.late_launches),
    "tandem_missing_marks": ("Steps that wrote no progress marks", lambda c: c.missing_marks),
    "tandem_kv_transfers": ("Requests handed over or accepted", lambda c: c.transfers),
    "tandem_kv_transfer_failures": ("Transfers that failed", lambda c: c.transfer_failures),
    "tandem_kv_transferred_pages": ("Pages sent", lambda c: c.transferred_pages),
    "tandem_kv_layered_pages": ("Pages sent layer by layer during their forward", lambda c: c.layered_pages),
    "tandem_kv_checksum_failures": ("Pages whose checksum did not match", lambda c: c.checksum_failures),
    "tandem_kv_record_failures": ("Records refused", lambda c: c.record_failures),
    REFUSED: (
        "Messages refused: malformed or in violation of the protocol",
        lambda c: c.refused_messages,
    ),
    "tandem_late_messages": ("Messages about requests that had ended", lambda c: c.late_messages),
}


GRAPH_COUNTERS: dict[str, tuple[str, Callable[[GraphTotals], float]]] = {
    "graph_replays": ("Forwards that replayed a captured graph", lambda g: g.replays),
    "graph_live_tokens": ("Tokens computed in replays", lambda g: g.live_tokens),
    "graph_padded_tokens": ("Padding tokens computed in replays and discarded", lambda g: g.padded_tokens),
}
GRAPH_GAUGES: dict[str, tuple[str, Callable[[GraphTotals], float]]] = {
    "graphs_captured": ("Captured graphs of a forward", lambda g: g.captured),
    "graphs_unused": ("Graphs that no batch has replayed yet", lambda g: g.unused),
}

RANK_GAUGES: dict[str, tuple[str, Callable[[RankReport], float]]] = {
    "tandem_rank_memory_bytes": (
        "Memory of a rank's device at the node's start; on a CPU resident memory",
        lambda r: r.memory_bytes,
    ),
    "tandem_rank_pool_bytes": ("Memory of a rank's share of the KV pool", lambda r: r.pool_bytes),
}
RANK_COUNTERS: dict[str, tuple[str, Callable[[RankTotals], float]]] = {
    "tandem_rank_plans": ("Plans that a rank has applied", lambda r: r.plans),
    "tandem_rank_collective_wait_seconds": (
        "Time in which a rank's host has waited for the other ranks",
        lambda r: r.collective_wait_seconds,
    ),
}


class RouterMetrics(Collector):
    """The router's metrics registry. `nodes` returns the nodes that are registered at that moment."""

    def __init__(
        self,
        model_name: str,
        nodes: Callable[[], Iterable[Node]],
        refused: Callable[[], int],
        conditions: Callable[[Iterable[Node]], Iterable[Condition]] = lambda nodes: (),
    ) -> None:
        """`refused` returns how many messages of nodes the router itself has refused so far."""
        self._nodes = nodes
        self._refused = refused
        self._conditions = conditions
        self._model = model_name
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> LoopHistogram:
            return LoopHistogram(name, text, {"model_name": model_name}, buckets, self._registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "At the router", TTFT_BUCKETS)
        queue = "From the arrival of a prompt at its prefill node to its first forward"
        self.prefill_queue = histogram("tandem_prefill_queue_seconds", queue, TTFT_BUCKETS)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "At the router", E2E_BUCKETS)
        tokens = (1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt length", tokens)
        self._generated = histogram("vllm:request_generation_tokens", "Answer length", tokens)
        self._success = Counter(
            "vllm:request_success",
            "Requests by finish reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._ended: dict[str, Counter] = {}  # finish reason -> its series, once it was counted
        self._errors = Counter(
            "tandem_request_errors", "Requests by error", ("code",), registry=self._registry
        )
        self.retries = Counter(
            "tandem_retries", "Requests placed again, by cause", ("code",), registry=self._registry
        )
        self.placement = PlacementMetrics(self._registry)
        self._handover = HandoverMetrics(model_name, self._registry)
        self._registry.register(self)

    def request_finished(self, timeline: Timeline, prompt_tokens: int, generated_tokens: int) -> None:
        """Observe a request once, when it is over."""
        stages = timeline.stages
        first = stages.get("first_token")
        if first is not None:
            self._ttft.observe(first)
        self._handover.observe(timeline.attempts)
        if timeline.outcome in (FINISH_STOP, FINISH_LENGTH):
            ended = self._ended.get(timeline.outcome)
            if ended is None:
                ended = self._ended[timeline.outcome] = self._success.labels(self._model, timeline.outcome)
            ended.inc()
            self._e2e.observe(stages["finished"])
            self._prompt.observe(prompt_tokens)
            self._generated.observe(generated_tokens)
        else:
            self._errors.labels(timeline.outcome.removeprefix("error: ").replace(" ", "_")).inc()

    def request_refused(self, code: str) -> None:
        """Count a request that was refused before it began; `request_finished` is not called for it."""
        self._errors.labels(code).inc()

    def collect(self) -> Iterator[Metric]:
        nodes = list(self._nodes())
        names = ("model_name", "engine", "role")
        for name, (text, of_load) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            for node in nodes:
                gauge.add_metric((self._model, node.name, node.role), of_load(node.load))
            yield gauge
        for name, (text, of_counters) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            for node in nodes:
                counter.add_metric((self._model, node.name, node.role), of_counters(node.counters))
            if name == REFUSED:
                counter.add_metric((self._model, "router", "router"), self._refused())
            yield counter
        yield from self._speculation(nodes, names)
        yield from self._graphs(nodes, names)
        yield from self._ranks(nodes, names)
        up = GaugeMetricFamily("tandem_node_up", "1 while a node takes requests", labels=names)
        for node in nodes:
            up.add_metric((self._model, node.name, node.role), float(node.state == "up"))
        yield up
        yield from condition_series(self._model, self._conditions(nodes))

    def _speculation(self, nodes: Iterable[Node], names: tuple[str, ...]) -> Iterator[Metric]:
        """Draft acceptance by position, and device time by the phases of a step."""
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the draft",
            labels=(*names, "position"),
        )
        phases = CounterMetricFamily(
            "tandem_phase_seconds", "Device time by the phases of a step", labels=(*names, "phase")
        )
        for node in nodes:
            values = (self._model, node.name, node.role)
            for place, count in enumerate(node.counters.spec_accepted_at):
                places.add_metric((*values, str(place)), count)
            for phase, seconds in node.counters.phase_seconds.items():
                phases.add_metric((*values, phase), seconds)
        yield places
        yield phases

    def _graphs(self, nodes: Iterable[Node], names: tuple[str, ...]) -> Iterator[Metric]:
        """Yield the counters of every capturable forward. The label `model` is target or draft."""
        found = [
            ((self._model, node.name, node.role, totals.phase, totals.model), totals)
            for node in nodes
            for totals in node.counters.graphs
        ]
        labels = (*names, "phase", "model")
        for name, (text, of_totals) in GRAPH_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, totals in found:
                counter.add_metric(values, of_totals(totals))
            yield counter
        fallbacks = CounterMetricFamily(
            "graph_fallbacks", "Forwards that ran eagerly, by reason", labels=(*labels, "reason")
        )
        for values, totals in found:
            for reason, count in totals.fallbacks.items():
                fallbacks.add_metric((*values, reason), count)
        yield fallbacks
        for name, (text, of_totals) in GRAPH_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for values, totals in found:
                gauge.add_metric(values, of_totals(totals))
            yield gauge

    def _ranks(self, nodes: Iterable[Node], names: tuple[str, ...]) -> Iterator[Metric]:
        """Yield the memory of every rank, and the progress of those of nodes that have several."""
        labels = (*names, "rank")
        for name, (text, of_report) in RANK_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for node in nodes:
                for rank, report in enumerate(node.register.ranks):
                    gauge.add_metric((self._model, node.name, node.role, str(rank)), of_report(report))
            yield gauge
        behind = GaugeMetricFamily("tandem_rank_plans_behind", "Plans not applied yet", labels=labels)
        found = [
            ((self._model, node.name, node.role, str(rank)), totals)
            for node in nodes
            for rank, totals in enumerate(node.counters.ranks)
        ]
        for name, (text, of_totals) in RANK_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for values, totals in found:
                counter.add_metric(values, of_totals(totals))
            yield counter
        for values, totals in found:
            behind.add_metric(values, totals.behind)
        yield behind

    def render(self) -> bytes:
        """Return all series in the Prometheus text format."""
        return generate_latest(self._registry)
