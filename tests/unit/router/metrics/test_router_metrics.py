"""/metrics: series of the router and of its nodes."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from common.messages.identity import (
    BucketTotals,
    GraphTotals,
    NodeCounters,
    NodeLoad,
    NodeRef,
    NodeState,
    RankReport,
    RankTotals,
    Role,
)
from common.messages.router_inbox import Register
from router.metrics.request_series import RequestFigures
from router.metrics.router_metrics import RouterMetrics
from router.metrics.timeline import Timeline, Timelines
from router.nodes.registry import Node
from tests.fakes.observing import router_metrics
from tests.fakes.served_series import rendered

ROUTER = 'engine="router",model_name="tiny"'
LES = ("0.001", "0.0025", "80.0", "+Inf")


def node(role: Role = "decode", name: str = "", **load: int) -> Node:
    ref = NodeRef(name=name or f"{role}-0", role=role, incarnation="i")
    register = Register(
        node=ref,
        host="h",
        pid=1,
        model_fingerprint="f",
        max_model_len=9,
        page_size=1,
        total_pages=9,
        effective_config={},
    )
    made = Node(register, 0.0)
    made.load = msgspec.convert(load, NodeLoad)
    totals = GraphTotals(
        phase="decode", model="target", replays=19, fallbacks={"too_large": 1}, captured=4, unused=3
    )
    made.counters = NodeCounters(
        generated_tokens=41,
        retractions=2,
        refused_messages=5,
        unsent_messages=6,
        spec_accepted_at=(9, 4),
        phase_seconds={"draft": 0.5, "verify": 2.0},
        graphs=(totals,),
    )
    return made


def finished(metrics: RouterMetrics, outcome: str, first: float | None = 0.5) -> None:
    timeline = Timeline("r", 0.0)
    if first is not None:
        timeline.mark("first_token", first)
    timeline.mark("finished", 2.0)
    timeline.outcome = outcome
    metrics.request_finished(timeline, RequestFigures(7, 3))


def series(metrics: RouterMetrics) -> dict[str, float]:
    lines = [line for line in rendered(metrics)[0].decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_nodes_are_read_at_scrape_time() -> None:
    nodes = [node(running=3, queued=1, free_pages=10, cached_pages=30, total_pages=100)]
    metrics = router_metrics(lambda: nodes, 7)
    labels = '{engine="decode-0",model_name="tiny",role="decode"}'
    got = series(metrics)
    assert got[f"vllm:num_requests_running{labels}"] == 3
    assert got[f"vllm:kv_cache_usage_perc{labels}"] == 0.6
    assert got[f"vllm:generation_tokens_total{labels}"] == 41
    assert got[f"vllm:num_preemptions_total{labels}"] == 2
    assert got[f"tandem_node_up{labels}"] == 1
    assert got[f"tandem_refused_messages_total{labels}"] == 5
    assert got[f"tandem_unsent_messages_total{labels}"] == 6
    assert got['tandem_refused_messages_total{engine="router",model_name="tiny",role="router"}'] == 7
    assert got[f"tandem_kv_events_failing{labels}"] == 0
    nodes[0].state = "draining"
    nodes[0].counters = NodeCounters(kv_events_problem="RuntimeError: a defect", kv_events_failures=2)
    got = series(metrics)
    assert got[f"tandem_node_up{labels}"] == 0
    assert got[f"tandem_kv_events_failing{labels}"] == 1
    assert got[f"tandem_kv_events_failures_total{labels}"] == 2
    nodes.clear()
    assert f"tandem_node_up{labels}" not in series(metrics)


def test_a_node_that_has_gone_is_down_and_not_forgotten() -> None:
    """An alert on its series could not fire otherwise."""
    here = [node(), node(name="more-1"), node("prefill")]
    here[1].pattern = "more-*"
    configured: dict[Role, list[str]] = {
        "prefill": ["prefill-0"],
        "decode": ["decode-0", "decode-1", "more-*"],
    }
    metrics = router_metrics(lambda: here, configured=configured)

    def up() -> dict[str, float]:
        found = {key: value for key, value in series(metrics).items() if key.startswith("tandem_node_up{")}
        return {key.split('"')[1]: value for key, value in found.items()}

    assert up() == {"decode-0": 1, "more-1": 1, "prefill-0": 1, "decode-1": 0}
    here.clear()
    assert up() == {"decode-0": 0, "decode-1": 0, "more-*": 0, "prefill-0": 0}


@pytest.mark.parametrize(
    ("prefill", "decode", "serving"), [("up", "draining", 1), ("draining", "draining", 0)]
)
def test_the_halves_of_a_movable_node_are_one_pod(
    prefill: NodeState, decode: NodeState, serving: int
) -> None:
    """While it changes its role or ends, neither is in standby."""
    halves = [node("prefill", name="flex-0"), node("decode", name="flex-0")]
    halves[0].state, halves[1].state = prefill, decode
    text = rendered(router_metrics(lambda: halves))[0].decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:healthy_pods_total{")]
    assert lines == [f'vllm:healthy_pods_total{{model_name="tiny",server="flex-0"}} {serving}.0']


def test_times_of_prompt_forwards_beside_their_predictions() -> None:
    one = node("prefill", queued_ms=125)
    one.counters = NodeCounters(forward_seconds=2.5, predicted_forward_seconds=2.0)
    metrics = router_metrics(lambda: [one])
    metrics.prefill_queue.observe(0.07)
    got, labels = series(metrics), '{engine="prefill-0",model_name="tiny",role="prefill"}'
    assert got[f"tandem_forward_seconds_total{labels}"] == 2.5
    assert got[f"tandem_predicted_forward_seconds_total{labels}"] == 2.0
    assert got[f"tandem_prefill_queue_ms{labels}"] == 125
    assert got['tandem_prefill_queue_seconds_bucket{le="0.06",model_name="tiny"}'] == 0
    assert got['tandem_prefill_queue_seconds_bucket{le="0.08",model_name="tiny"}'] == 1


def test_transfers_that_took_too_long_by_cause() -> None:
    """Prompts to which no decode node granted pages are what vLLM calls expired."""
    one = node("prefill")
    one.counters = NodeCounters(transfer_timeouts={"slots": 3, "stall": 1})
    got = series(router_metrics(lambda: [one, node()]))
    labels = 'engine="prefill-0",model_name="tiny",role="prefill"'
    assert got[f"vllm:nixl_num_kv_expired_reqs_total{{{labels}}}"] == 3
    assert got[f'tandem_kv_transfer_timeouts_total{{cause="stall",{labels}}}'] == 1
    assert sum(name.startswith("vllm:nixl_num_kv_expired_reqs_total") for name in got) == 1


def test_graphs_by_phase_model_and_reason() -> None:
    """Captured forwards have counters and gauges by phase, model and reason."""
    got = series(router_metrics(lambda: [node()]))
    labels = 'engine="decode-0",model="target",model_name="tiny",phase="decode"'
    assert got[f'tandem_graph_replays_total{{{labels},role="decode"}}'] == 19
    assert got[f'tandem_graph_fallbacks_total{{{labels},reason="too_large",role="decode"}}'] == 1
    assert got[f'tandem_graphs_captured{{{labels},role="decode"}}'] == 4
    assert got[f'tandem_graphs_unused{{{labels},role="decode"}}'] == 3


def test_ranks_by_number() -> None:
    one = node()
    reports = (
        RankReport(device="cuda:0", pages=9, pool_bytes=70, memory_bytes=100),
        RankReport(device="cuda:1", pages=9),
    )
    one.register = msgspec.structs.replace(one.register, ranks=reports)
    one.counters = NodeCounters(
        ranks=(RankTotals(plans=8), RankTotals(plans=6, behind=2, collective_wait_seconds=0.25))
    )
    got = series(router_metrics(lambda: [one]))
    labels = [f'{{engine="decode-0",model_name="tiny",rank="{rank}",role="decode"}}' for rank in (0, 1)]
    assert [got[f"tandem_rank_memory_bytes{each}"] for each in labels] == [100, 0]
    assert [got[f"tandem_rank_pool_bytes{each}"] for each in labels] == [70, 0]
    assert [got[f"tandem_rank_plans_total{each}"] for each in labels] == [8, 6]
    assert [got[f"tandem_rank_plans_behind{each}"] for each in labels] == [0, 2]
    assert got[f"tandem_rank_collective_wait_seconds_total{labels[1]}"] == 0.25


def test_speculation_by_place_and_by_phase() -> None:
    """How often the draft at each position was accepted, and the device time of each phase."""
    got = series(router_metrics(lambda: [node()]))
    labels = 'engine="decode-0",model_name="tiny"'
    for place, count in enumerate((9, 4)):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert got[f'{name}{{{labels},position="{place}",role="decode"}}'] == count
    assert got[f'tandem_phase_seconds_total{{{labels},phase="verify",role="decode"}}'] == 2.0
    assert got[f'tandem_phase_seconds_total{{{labels},phase="draft",role="decode"}}'] == 0.5


def test_a_node_without_a_load_report_counts_as_empty_in_metrics() -> None:
    metrics = router_metrics(lambda: [node()])
    assert series(metrics)['vllm:kv_cache_usage_perc{engine="decode-0",model_name="tiny",role="decode"}'] == 0


def test_the_stages_of_a_hand_over_have_a_histogram_each() -> None:
    metrics = router_metrics(list)
    timeline = Timeline("r", 0.0)
    attempt = timeline.begin_attempt()
    timeline.anchor(attempt, {"prefill_end": 0.1, "record_sent": 0.102}, "prefill", 0.0)
    seconds = (0.102, 0.103, 0.107, 0.109, 0.115)
    names = ("record_sent", "record_seen", "decode_start", "step_started", "first_decode")
    timeline.anchor(attempt, dict(zip(names, seconds)), "decode", 0.0)
    timeline.mark("finished", 9.0)
    timeline.outcome = "error: node_lost"
    metrics.request_finished(timeline, RequestFigures(7, 3))
    finished(metrics, "stop")  # which ended with its first token
    got = series(metrics)
    for stage, took in (("sent", 2), ("seen", 1), ("joined", 4), ("started", 2), ("drawn", 6)):
        labels = f'model_name="tiny",stage="{stage}"'
        assert got[f"tandem_handover_seconds_count{{{labels}}}"] == 1
        assert round(1000 * got[f"tandem_handover_seconds_sum{{{labels}}}"]) == took


def test_stages_of_two_attempts_are_not_mixed() -> None:
    """The first attempt's nodes report part of their stages only after those of the second one."""
    metrics, timelines = router_metrics(list), Timelines()
    timeline = Timeline("r", 0.0)
    timelines.open(1, timeline, 0.0, "p", "d")
    timelines.close(1)
    timelines.open(2, timeline, 5.0, "p", "d")
    timelines.anchor(2, "p", {"prefill_end": 0.1, "record_sent": 0.102})
    timelines.anchor(2, "d", {"decode_start": 0.11, "step_started": 0.12, "first_decode": 0.13})
    timelines.anchor(1, "p", {"prefill_end": 2.0})
    timelines.anchor(1, "d", {"decode_start": 3.0, "step_started": 3.5})
    timeline.mark("finished", 9.0)
    timeline.outcome = "error: node_lost"
    metrics.request_finished(timeline, RequestFigures(7, 3))
    got = series(metrics)
    for stage, count, took in (("sent", 1, 2), ("started", 2, 510), ("drawn", 1, 10)):
        labels = f'model_name="tiny",stage="{stage}"'
        assert got[f"tandem_handover_seconds_count{{{labels}}}"] == count
        assert round(1000 * got[f"tandem_handover_seconds_sum{{{labels}}}"]) == took


def success(reason: str) -> str:
    return f'vllm:request_success_total{{engine="router",finished_reason="{reason}",model_name="tiny"}}'


def test_requests_are_counted_by_outcome() -> None:
    metrics = router_metrics(list)
    for outcome in ("stop", "length", "stop"):
        finished(metrics, outcome)
    finished(metrics, "error: node_lost", first=None)
    finished(metrics, "client gone")
    got = series(metrics)
    ended = {reason: got[success(reason)] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 2, "length": 1, "abort": 1, "error": 1}
    assert got['tandem_request_errors_total{code="node_lost"}'] == 1
    assert got['tandem_request_errors_total{code="client_gone"}'] == 1
    assert got[f"vllm:time_to_first_token_seconds_count{{{ROUTER}}}"] == 4
    assert got[f"vllm:e2e_request_latency_seconds_count{{{ROUTER}}}"] == 3
    assert got[f"vllm:request_generation_tokens_sum{{{ROUTER}}}"] == 9


def test_a_prompt_is_counted_by_its_prefill_node_only() -> None:
    """Both nodes of a request look the prompt up in their caches and count its tokens."""
    prefill, decode = node("prefill"), node("decode")
    prefill.counters = NodeCounters(prompt_tokens=10, cached_tokens=4, host_queries=6, host_hits=2)
    decode.counters = NodeCounters(prompt_tokens=10, cached_tokens=3)
    got = series(router_metrics(lambda: [prefill, decode]))

    def total(name: str) -> float:
        return sum(value for key, value in got.items() if key.startswith(f"{name}{{"))

    assert total("vllm:prompt_tokens_total") == 10
    assert total("vllm:prompt_tokens_by_source_total") == 10
    assert total("vllm:prompt_tokens_cached_total") == 6
    assert total("vllm:prompt_tokens_cached_by_source_total") == 6
    assert total("tandem_host_tier_queries_total") == 6
    assert total("tandem_host_tier_hits_total") == 2
    assert total("vllm:prefix_cache_queries_total") == 10
    assert total("vllm:prefix_cache_hits_total") == 4
    assert total("vllm:external_prefix_cache_hits_total") == 7
    assert total("tandem_kv_reused_tokens_total") == 3


def test_the_times_of_a_request_by_vllms_names() -> None:
    metrics = router_metrics(list)
    timeline = Timeline("r", 0.0)
    timeline.mark("entered", 0.25)
    timeline.mark("placed", 0.5)
    attempt = timeline.begin_attempt()
    timeline.anchor(attempt, {"slots": 1.0, "prefill_start": 2.0, "prefill_end": 3.5}, "prefill", 0.5)
    timeline.mark("first_token", 4.5)
    decoded = {"record_seen": 4.5, "step_started": 5.5, "first_decode": 6.0}
    timeline.anchor(attempt, decoded, "decode", 0.5)
    timeline.mark("finished", 12.5)
    timeline.outcome = "length"
    metrics.request_finished(timeline, RequestFigures(20, 5, 16, 5, 1, 5))
    got = series(metrics)
    times = {
        "vllm:request_queue_time_seconds": 2.5,
        "vllm:request_prefill_time_seconds": 2,
        "vllm:request_decode_time_seconds": 8,
        "vllm:request_inference_time_seconds": 10,
        "vllm:request_time_per_output_token_seconds": 2,
        "vllm:request_prefill_kv_computed_tokens": 4,
        "vllm:request_max_num_generation_tokens": 5,
        "vllm:request_params_max_tokens": 5,
        "vllm:request_params_n": 1,
        "tandem_kv_transfer_seconds": 2.5,
    }
    assert {name: got[f"{name}_sum{{{ROUTER}}}"] for name in times} == times
    parts = {
        "router.tokenize": 0.25,
        "router.queue": 0.25,
        "prefill.queue": 2,
        "prefill.compute": 1.5,
        "kv.transfer": 1,
        "decode.queue": 1,
        "decode.stream": 6.5,
        "router.answer": 0,
    }
    name = "tandem_stage_seconds_sum"
    assert {part: got[f'{name}{{model_name="tiny",stage="{part}"}}'] for part in parts} == parts
    assert sum(parts.values()) == 12.5


def test_histograms_that_nodes_observe() -> None:
    """Nodes report counts; names, bounds and labels are added here. Buckets that nothing was counted in exist, too."""
    one, idle = node(), node("prefill")
    one.counters = NodeCounters(inter_token=BucketTotals(counts=(0, 3, *[0] * 20, 1), sum=90.5))
    got = series(router_metrics(lambda: [one, idle]))
    labels = 'engine="decode-0",{}model_name="tiny",role="decode"'
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        buckets = {le: got[f"{name}_bucket{{{labels.format(f'le={chr(34)}{le}{chr(34)},')}}}"] for le in LES}
        assert buckets == {"0.001": 0, "0.0025": 3, "80.0": 3, "+Inf": 4}
        assert got[f"{name}_sum{{{labels.format('')}}}"] == 90.5
    steps = 'vllm:iteration_tokens_total_count{engine="prefill-0",model_name="tiny",role="prefill"}'
    assert got[steps] == 0


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
        ("application/openmetrics-text; version=x.y, text/plain; version=9", "application/openmetrics-text"),
        ("application/json, text/plain; version=x", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_negotiated(accept: str, media: str) -> None:
    metrics = router_metrics(lambda: [node(total_pages=1), node("prefill")])
    finished(metrics, "stop")
    shown, kind = rendered(metrics, accept)
    assert kind.startswith(media)
    parse = openmetrics_families if "openmetrics" in kind else text_families
    names = {sample.name for family in parse(shown.decode()) for sample in family.samples}
    assert {"vllm:generation_tokens_total", "vllm:request_params_n_bucket"} <= names


def test_every_name_is_given_once() -> None:
    metrics = router_metrics(lambda: [node(total_pages=1)])
    names = [
        line.split()[2] for line in rendered(metrics)[0].decode().splitlines() if line.startswith("# TYPE")
    ]
    assert len(names) == len(set(names))
