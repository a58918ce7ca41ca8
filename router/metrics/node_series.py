"""Series of the nodes, under vLLM's names where vLLM has one: read at scrape time from the latest heartbeat of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.messages.identity import BucketTotals, NodeCounters, NodeLoad, Role
from common.observability.histogram import STEP_TOKENS, TOKEN_SECONDS, TRANSFER_BYTES
from common.observability.throughput import kv_usage
from router.metrics.histogram import bucket_rows
from router.nodes.registry import Node

LABELS = ("model_name", "engine", "role")
PREFILL, DECODE = ("prefill",), ("decode",)
BOTH = (*PREFILL, *DECODE)
REFUSED = "tandem_refused_messages"  # the router also counts its own
UP, UP_TEXT = "tandem_node_up", "1 while a node takes requests"
WAITING = "vllm:num_requests_waiting"  # so do requests that wait at the router


class Gauge(NamedTuple):
    """A gauge that nodes of some roles have."""

    text: str
    read: Callable[[NodeLoad], float]
    roles: tuple[str, ...] = BOTH


class Counter(NamedTuple):
    """A counter that nodes of some roles have: a prompt is counted by its prefill node only."""

    text: str
    read: Callable[[NodeCounters], float]
    roles: tuple[str, ...] = BOTH


_USAGE = Gauge("KV cache usage: pages neither free nor cached, 0 to 1", kv_usage)
_QUERIES = Counter("Prompt tokens looked up", lambda c: c.prompt_tokens, PREFILL)
_HITS = Counter("Prompt tokens found", lambda c: c.cached_tokens, PREFILL)
_FETCHED = Counter(
    "Prompt tokens whose KV came from a prefill node",
    lambda c: c.prompt_tokens - c.cached_tokens - c.host_hits,
    DECODE,
)

GAUGES: dict[str, Gauge] = {
    "vllm:num_requests_running": Gauge("Requests in a batch", lambda load: load.running),
    WAITING: Gauge("Requests not started yet", lambda load: load.queued),
    "vllm:num_requests_swapped": Gauge(
        "Requests that left the batch for lack of pages", lambda load: load.retracted
    ),
    "vllm:kv_cache_usage_perc": _USAGE,
    "vllm:gpu_cache_usage_perc": _USAGE,  # older dashboards
    "tandem_transferring_requests": Gauge("Requests in transfer", lambda load: load.transferring),
    "tandem_prefill_queue_ms": Gauge(
        "Predicted time until all prompts of the node are computed, in milliseconds",
        lambda load: load.queued_ms,
        PREFILL,
    ),
    "tandem_free_pages": Gauge("Free KV pages", lambda load: load.free_pages),
    "tandem_cached_pages": Gauge("KV pages that only the prefix cache holds", lambda load: load.cached_pages),
    "tandem_quarantined_pages": Gauge(
        "KV pages that a peer may still write", lambda load: load.quarantined_pages
    ),
    "tandem_host_tier_tokens": Gauge(
        "Tokens of cached prefixes in host memory", lambda load: load.host_cached_tokens
    ),
    "tandem_host_tier_total_tokens": Gauge(
        "Tokens for which there is room in host memory", lambda load: load.host_total_tokens
    ),
    "tandem_total_pages": Gauge("KV pages in total, without the padding page", lambda load: load.total_pages),
}
COUNTERS: dict[str, Counter] = {
    "vllm:prompt_tokens": Counter("Prompt tokens received", lambda c: c.prompt_tokens, PREFILL),
    "vllm:prompt_tokens_cached": Counter(
        "Prompt tokens found, in pages or host memory", lambda c: c.cached_tokens + c.host_hits, PREFILL
    ),
    "vllm:generation_tokens": Counter("Tokens sampled", lambda c: c.generated_tokens),
    "vllm:prefix_cache_queries": _QUERIES,
    "vllm:prefix_cache_hits": _HITS,
    "vllm:gpu_prefix_cache_queries": _QUERIES,  # older dashboards
    "vllm:gpu_prefix_cache_hits": _HITS,
    "vllm:external_prefix_cache_queries": _FETCHED,
    "vllm:external_prefix_cache_hits": _FETCHED,  # decode nodes compute no prompts: all were found
    "tandem_kv_reused_tokens": Counter(
        "Prompt tokens that the decode node already had, so that they were not sent",
        lambda c: c.cached_tokens,
        DECODE,
    ),
    "vllm:num_preemptions": Counter("Retractions", lambda c: c.retractions),
    "vllm:spec_decode_num_drafts": Counter(
        "Steps of one request that verified drafts", lambda c: c.spec_drafts
    ),
    "vllm:spec_decode_num_draft_tokens": Counter("Draft tokens verified", lambda c: c.spec_draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": Counter(
        "Draft tokens accepted", lambda c: c.spec_accepted_tokens
    ),
    "tandem_forced_tokens": Counter(
        "Tokens forced by grammars and limits of reasoning that were verified as drafts",
        lambda c: c.spec_forced_tokens,
    ),
    "tandem_accepted_forced_tokens": Counter("Forced tokens accepted", lambda c: c.spec_accepted_forced),
    "tandem_node_requests": Counter("Requests accepted", lambda c: c.requests),
    "tandem_steps": Counter("Forward launches", lambda c: c.steps),
    "tandem_forward_seconds": Counter("Device time of prompt forwards", lambda c: c.forward_seconds),
    "tandem_predicted_forward_seconds": Counter(
        "What the node predicted for the same forwards; it plans by that",
        lambda c: c.predicted_forward_seconds,
    ),
    "tandem_late_launches": Counter(
        "Steps before which the device had run out of work", lambda c: c.late_launches
    ),
    "tandem_missing_marks": Counter("Steps that wrote no progress marks", lambda c: c.missing_marks),
    "tandem_kv_transfers": Counter("Requests handed over or accepted", lambda c: c.transfers),
    "tandem_kv_transfer_failures": Counter("Transfers that failed", lambda c: c.transfer_failures),
    "vllm:nixl_num_failed_transfers": Counter("Transfers that failed", lambda c: c.transfer_failures),
    "vllm:nixl_num_kv_expired_reqs": Counter(
        "Prompts whose KV was given up because their decode node granted no pages in time",
        lambda c: c.transfer_timeouts.get("slots", 0),
        PREFILL,
    ),
    "tandem_kv_transferred_pages": Counter("Pages sent", lambda c: c.transferred_pages),
    "tandem_kv_layered_pages": Counter(
        "Pages sent layer by layer during their forward", lambda c: c.layered_pages
    ),
    "tandem_kv_checksum_failures": Counter(
        "Pages whose checksum did not match", lambda c: c.checksum_failures
    ),
    "tandem_kv_record_failures": Counter("Records refused", lambda c: c.record_failures),
    "tandem_kv_quarantined_transfers": Counter(
        "Transfers whose pages were kept until nothing could write to them", lambda c: c.quarantined_transfers
    ),
    "tandem_kv_abort_retries": Counter("Repeated requests to stop writing", lambda c: c.abort_retries),
    "tandem_duplicate_dropped": Counter("Repeated announcements, dropped", lambda c: c.duplicate_messages),
    "tandem_host_tier_queries": Counter(
        "Prompt tokens that were in no page, looked up in host memory", lambda c: c.host_queries
    ),
    "tandem_host_tier_hits": Counter("Prompt tokens copied from host memory", lambda c: c.host_hits),
    "tandem_host_tier_loads": Counter(
        "Prompts for which host memory supplied a prefix", lambda c: c.host_loads
    ),
    "tandem_host_tier_loaded_bytes": Counter("Bytes copied from host memory", lambda c: c.host_loaded_bytes),
    "tandem_host_tier_stores": Counter(
        "Prompts of which something was copied to host memory", lambda c: c.host_stores
    ),
    "tandem_host_tier_stored_bytes": Counter("Bytes copied to host memory", lambda c: c.host_stored_bytes),
    "tandem_host_tier_evicted_tokens": Counter(
        "Tokens replaced by others in host memory", lambda c: c.host_evicted_tokens
    ),
    "tandem_host_tier_checksum_failures": Counter(
        "Blocks of host memory that had changed, and were computed or sent again",
        lambda c: c.host_checksum_failures,
    ),
    "tandem_kv_events_dropped": Counter(
        "Changes of prefix caches that were not published as KV events", lambda c: c.kv_events_dropped
    ),
    "tandem_kv_events_failures": Counter(
        "Defects after which a node began again to publish KV events", lambda c: c.kv_events_failures
    ),
    REFUSED: Counter(
        "Messages refused: malformed or in violation of the protocol",
        lambda c: c.refused_messages,
    ),
    "tandem_unsent_messages": Counter(
        "Messages to routers and nodes that were dropped: too many waited for the receiver, or it had gone",
        lambda c: c.unsent_messages,
    ),
    "tandem_late_messages": Counter("Messages about requests that had ended", lambda c: c.late_messages),
}


class NodeHistogram(NamedTuple):
    """A histogram that nodes observe once per step or transfer, under all its names."""

    names: tuple[str, ...]
    text: str
    bounds: tuple[float, ...]
    read: Callable[[NodeCounters], BucketTotals]
    roles: tuple[str, ...] = BOTH


HISTOGRAMS = (
    NodeHistogram(
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "Time between two outputs of a request at its decode node",
        TOKEN_SECONDS,
        lambda c: c.inter_token,
        DECODE,
    ),
    NodeHistogram(
        ("vllm:iteration_tokens_total",),
        "Tokens per forward of a prefill node, and per step of a decode node",
        STEP_TOKENS,
        lambda c: c.step_tokens,
    ),
    NodeHistogram(
        ("tandem_kv_transfer_bytes", "vllm:nixl_bytes_transferred"),
        "Bytes per request handed over, by whichever transport",
        TRANSFER_BYTES,
        lambda c: c.transfer_bytes,
        PREFILL,
    ),
)
# label of vllm:prompt_tokens_by_source -> tokens
SOURCES: dict[str, Callable[[NodeCounters], float]] = {
    "local_compute": lambda c: c.prompt_tokens - c.cached_tokens - c.host_hits,
    "local_cache_hit": lambda c: c.cached_tokens,
    "external_kv_transfer": lambda c: c.host_hits,
}
SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


class RouterCounts(NamedTuple):
    """Counts of the router itself, which series of nodes show in addition to those of the nodes."""

    refused: int  # messages of nodes that it has refused
    waiting: int  # requests that wait at the router for room on a node


def node_series(model: str, nodes: Iterable[Node], own: RouterCounts | None) -> Iterator[Metric]:
    """Yield all series of some nodes but those of graphs and placement; with those of the router if `own` is given."""
    labelled = [((model, node.name, node.role), node) for node in nodes]
    router = (model, "router", "router")
    yield from _gauges(labelled, own, router)
    yield from _counters(labelled, own, router)
    yield from _histograms(labelled)
    yield from _by_reason(labelled, own, router)
    yield from _of_steps(labelled)
    yield from _states(labelled)


_Labels = tuple[str, str, str]  # the values of LABELS
_Labelled = Sequence[tuple[_Labels, Node]]


def _gauges(labelled: _Labelled, own: RouterCounts | None, router: _Labels) -> Iterator[Metric]:
    for name, gauge in GAUGES.items():
        family = GaugeMetricFamily(name, gauge.text, labels=LABELS)
        for values, node in labelled:
            if node.role in gauge.roles:
                family.add_metric(values, gauge.read(node.load))
        if own is not None and name == WAITING:
            family.add_metric(router, own.waiting)
        yield family


def _counters(labelled: _Labelled, own: RouterCounts | None, router: _Labels) -> Iterator[Metric]:
    for name, counter in COUNTERS.items():
        family = CounterMetricFamily(name, counter.text, labels=LABELS)
        for values, node in labelled:
            if node.role in counter.roles:
                family.add_metric(values, counter.read(node.counters))
        if own is not None and name == REFUSED:
            family.add_metric(router, own.refused)
        yield family


def _histograms(labelled: _Labelled) -> Iterator[Metric]:
    for histogram in HISTOGRAMS:
        for name in histogram.names:
            family = HistogramMetricFamily(name, histogram.text, labels=LABELS)
            for values, node in labelled:
                if node.role in histogram.roles:
                    totals = histogram.read(node.counters)
                    counts = totals.counts or (0,) * (len(histogram.bounds) + 1)
                    family.add_metric(values, bucket_rows(histogram.bounds, counts), totals.sum)
            yield family


def _by_reason(labelled: _Labelled, own: RouterCounts | None, router: _Labels) -> Iterator[Metric]:
    """Yield what vLLM breaks down: waiting requests, KV that is fetched, sources of prompt tokens."""
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "capacity: not started yet; deferred: waiting for KV from a prefill node",
        labels=(*LABELS, "reason"),
    )
    fetching = GaugeMetricFamily(
        "vllm:num_requests_kv_fetch_by_stage",
        "Requests of decode nodes whose KV is awaited",
        labels=(*LABELS, "stage"),
    )
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by where their KV came from",
        labels=(*LABELS, "source"),
    )
    tiers = CounterMetricFamily(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found, by the memory that held them",
        labels=(*LABELS, "source"),
    )
    if own is not None:
        reasons.add_metric((*router, "capacity"), own.waiting)
    for values, node in labelled:
        load = node.load
        reasons.add_metric((*values, "capacity"), load.queued)
        if node.role == "decode":
            reasons.add_metric((*values, "deferred"), load.transferring)
            fetching.add_metric((*values, "waiting_to_start"), load.queued - load.retracted)
            fetching.add_metric((*values, "in_progress"), load.transferring)
        else:
            for source, read in SOURCES.items():
                sources.add_metric((*values, source), read(node.counters))
            tiers.add_metric((*values, "device"), node.counters.cached_tokens)
            tiers.add_metric((*values, "host"), node.counters.host_hits)
    yield from (reasons, fetching, sources, tiers)


def _of_steps(labelled: _Labelled) -> Iterator[Metric]:
    """Draft acceptance by position, device time by the phases of a step, and transfers that took too long."""
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by their position in the draft",
        labels=(*LABELS, "position"),
    )
    phases = CounterMetricFamily(
        "tandem_phase_seconds", "Device time by the phases of a step", labels=(*LABELS, "phase")
    )
    late = CounterMetricFamily(
        "tandem_kv_transfer_timeouts", "Transfers that took too long, by cause", labels=(*LABELS, "cause")
    )
    for values, node in labelled:
        counters = node.counters
        for place, count in enumerate(counters.spec_accepted_at):
            places.add_metric((*values, str(place)), count)
        for phase, seconds in counters.phase_seconds.items():
            phases.add_metric((*values, phase), seconds)
        for cause, count in counters.transfer_timeouts.items():
            late.add_metric((*values, cause), count)
    yield from (places, phases, late)


def missing_series(
    model: str, nodes: Iterable[Node], configured: Mapping[Role, Iterable[str]]
) -> Iterator[Metric]:
    """Yield that the entries of the cluster file without a registered node take no requests."""
    up = GaugeMetricFamily(UP, UP_TEXT, labels=LABELS)
    there = {(node.role, node.pattern or node.name) for node in nodes}
    for role, names in configured.items():
        for name in names:
            if (role, name) not in there:
                up.add_metric((model, name, role), 0.0)
    yield up


def _states(labelled: _Labelled) -> Iterator[Metric]:
    """Yield which nodes take requests, and facts about them."""
    up = GaugeMetricFamily(UP, UP_TEXT, labels=LABELS)
    draining = GaugeMetricFamily("tandem_node_draining", "1 while a node drains", labels=LABELS)
    unpublished = GaugeMetricFamily(
        "tandem_kv_events_failing", "1 while a defect keeps a node from publishing KV events", labels=LABELS
    )
    healthy = GaugeMetricFamily(
        "vllm:healthy_pods_total", "1 while a node takes requests", labels=("model_name", "server")
    )
    sleep = GaugeMetricFamily(
        "vllm:engine_sleep_state", "Nodes are always awake", labels=(*LABELS, "sleep_state")
    )
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The KV cache of a node",
        labels=(*LABELS, "block_size", "num_gpu_blocks", "cache_dtype"),
    )
    pods: dict[tuple[str, str], float] = {}
    for values, node in labelled:
        serving = float(node.state == "up")
        up.add_metric(values, serving)
        draining.add_metric(values, float(node.state == "draining"))
        unpublished.add_metric(values, float(bool(node.counters.kv_events_problem)))
        if node.state != "standby":
            # Neither half of a movable node is in standby while it changes its role or ends.
            pods[values[:2]] = max(serving, pods.get(values[:2], 0.0))
        for state, holds in SLEEP_STATES.items():
            sleep.add_metric((*values, state), holds)
        register = node.register
        facts = (register.page_size, register.total_pages, register.effective_config.get("kv_dtype", ""))
        cache.add_metric((*values, *map(str, facts)), 1)
    for pod, serving in pods.items():
        healthy.add_metric(pod, serving)
    yield from (up, draining, unpublished, healthy, sleep, cache)
