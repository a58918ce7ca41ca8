"""Prints the result of one rate of deploy/bench in a line, after a line for each seed.

python -m tests.gpu.load_lines NAME BENCH_JSON METRICS_BEFORE METRICS_AFTER

The accept length comes from the router's counters before and after the load, so that it belongs to this rate only.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def total(metrics: str, family: str) -> float:
    """Return the sum of a counter over all engines and models; 0 without samples."""
    return sum(
        sample.value
        for each in text_string_to_metric_families(metrics)
        for sample in each.samples
        if sample.name == f"{family}_total"
    )


def accept_length(before: str, after: str) -> float | None:
    """Return the tokens per verification between two answers of /metrics; None if nothing was drafted."""
    drafts = total(after, DRAFTS) - total(before, DRAFTS)
    return 1 + (total(after, ACCEPTED) - total(before, ACCEPTED)) / drafts if drafts else None


def line(summary: dict[str, Any]) -> str:
    """Return a summary of deploy/bench as text; null stands for percentiles without answers."""

    def of(*names: str) -> str:
        values = (math.nan if summary[name] is None else summary[name] for name in names)
        return " / ".join(f"{value:.1f}" for value in values)

    return (
        f"first token p50 / p99 {of('ttft_ms_p50', 'ttft_ms_p99')} ms, "
        f"gaps p50 / p99 / max {of('gap_ms_p50', 'gap_ms_p99', 'gap_ms_max')} ms, "
        f"every gap within the limit: {100 * summary['gaps_good']:.1f} % of {summary['requests']} requests, "
        f"failed: {summary['failed']}, client late by at most {of('loop_lag_ms_max')} ms"
    )


def lines(name: str, report: dict[str, Any], accepted: float | None) -> Iterator[str]:
    """Return the lines of all loads of a report."""
    limit = 1e3 * report["options"]["limits"]["gap"]
    for load in report["loads"]:
        for seed, summary in load["seeds"].items():
            yield f"{name} {load['load']} seed {seed}: {line(summary)}"
        told = "" if accepted is None else f", accept length {accepted:.2f}"
        yield f"{name} {load['load']} all seeds: {line(load['summary'])} ({limit:g} ms){told}"


def main(arguments: list[str]) -> None:
    name, file, *metrics = arguments
    before, after = (Path(each).read_text() for each in metrics)
    for each in lines(name, json.loads(Path(file).read_text()), accept_length(before, after)):
        print(each)


if __name__ == "__main__":
    main(sys.argv[1:])
