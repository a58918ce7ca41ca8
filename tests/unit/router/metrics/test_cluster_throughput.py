"""The router's line of throughput: the sum of all nodes, each prompt once, and requests that wait at the router."""

from __future__ import annotations

from common.messages.identity import NodeCounters
from router.metrics.cluster_throughput import ClusterThroughput
from tests.unit.common.test_throughput import Lines
from tests.unit.router.metrics.test_router_metrics import node


def test_the_cluster_is_the_sum_of_its_nodes() -> None:
    prefill = node("prefill", running=1, queued=2, free_pages=3, total_pages=4)
    decode = node("decode", running=5, free_pages=1, total_pages=4)
    prefill.counters = NodeCounters(prompt_tokens=100, generated_tokens=10)
    decode.counters = NodeCounters(prompt_tokens=100, generated_tokens=90)
    lines, times = Lines(), iter((0.0, 10.0))
    ClusterThroughput(lines, lambda: next(times), [prefill, decode], lambda: 3).log_if_due()
    (line,) = lines.kept
    assert (line["prompt_tokens_per_s"], line["generated_tokens_per_s"]) == (10.0, 10.0)
    assert (line["running"], line["queued"], line["kv_usage"]) == (6, 5, 0.75)
