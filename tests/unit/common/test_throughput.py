"""The line of throughput: every ten seconds while there is load, and never without."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.messages.identity import NodeCounters, NodeLoad
from common.observability.logs import Log
from common.observability.throughput import Activity, ThroughputLog, Totals, kv_usage, totals_of


class Lines(Log):
    """Keeps the fields of each line."""

    def __init__(self) -> None:
        super().__init__("test")
        self.kept: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.kept.append({"event": event, **fields})

    warning = info


def test_rates_since_the_last_line() -> None:
    lines = Lines()
    log = ThroughputLog(lines, lambda: 100.0)
    load = NodeLoad(queued=2, running=3, free_pages=10, cached_pages=30, total_pages=100)
    counters = NodeCounters(
        prompt_tokens=400, cached_tokens=100, generated_tokens=50, spec_drafts=20, spec_accepted_tokens=30
    )
    work = Activity(totals_of(counters), load.running, load.queued, kv_usage(load))
    log.log_if_due(109.9, lambda: work)
    assert lines.kept == []
    log.log_if_due(110.0, lambda: work)
    assert lines.kept == [
        {
            "event": "throughput",
            "prompt_tokens_per_s": 40.0,
            "generated_tokens_per_s": 5.0,
            "running": 3,
            "queued": 2,
            "kv_usage": 0.6,
            "prefix_hit_rate": 0.25,
            "accept_length": 2.5,
        }
    ]
    log.log_if_due(115.0, lambda: work)
    log.log_if_due(130.0, lambda: work._replace(totals=work.totals._replace(generated=150)))
    assert lines.kept[1]["generated_tokens_per_s"] == 5.0
    assert "accept_length" not in lines.kept[1]


def test_an_idle_process_logs_nothing() -> None:
    lines = Lines()
    log = ThroughputLog(lines, lambda: 0.0)
    for now in range(10, 100, 10):
        log.log_if_due(float(now), lambda: Activity(Totals(generated=7), 0, 0, 0.5))
    assert len(lines.kept) == 1, "tokens were generated before the first look only"


def test_totals_of_a_replaced_process_begin_again() -> None:
    lines = Lines()
    log = ThroughputLog(lines, lambda: 0.0)
    for now, generated in ((10.0, 1000), (20.0, 100), (30.0, 300)):
        log.log_if_due(now, partial(Activity, Totals(generated=generated), 1, 0, 0.0))
    assert [line["generated_tokens_per_s"] for line in lines.kept] == [100.0, 0.0, 20.0]
