"""Histograms whose values are counted many at a time."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.metrics.histogram import BatchHistogram, LoopHistogram

VALUES = (0.0, 1.0, 1.5, 2.0, 7.0)


def test_it_reports_as_one_that_counts_each_value_at_once() -> None:
    shown = []
    for kind in (LoopHistogram, BatchHistogram):
        registry = CollectorRegistry()
        made = kind("seconds", "text", {"a": "b"}, (1, 2), registry)
        for value in VALUES:
            made.add(value) if isinstance(made, BatchHistogram) else made.observe(value)
        shown.append(
            [line for line in generate_latest(registry).decode().splitlines() if "created" not in line]
        )
    assert shown[0] == shown[1]
    assert 'seconds_bucket{a="b",le="2.0"} 4.0' in shown[1]


def test_values_that_are_counted_are_kept_no_longer() -> None:
    made = BatchHistogram("seconds", "text", {}, (1, 2))
    for _ in range(2):
        for value in VALUES:
            made.add(value)
        made.settle()
        made.settle()
    assert (made.counts, made.sum) == ([4, 4, 2], 2 * sum(VALUES))
