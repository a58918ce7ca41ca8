"""The parts of the gap between a request's first token, from a prefill node, and its second, from a decode node.

sent     from the first token to the handoff record, on the prefill node
seen     until the decode node reads that the record is there
joined   until pages and record are verified and the request has joined the batch
started  until its first step begins on the device
drawn    until the tokens of that step have been read
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from router.metrics.histogram import LoopHistogram

NAME = "tandem_handover_seconds"
TEXT = "Parts of the gap between the first token and the first one of the decode node"
BUCKETS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.1,
    0.5,
    1.0,
)
# stage -> names in a timeline at which it begins and ends, both by the clock of one node
STAGES = {
    "sent": ("prefill.prefill_end", "prefill.record_sent"),
    "seen": ("decode.record_sent", "decode.record_seen"),
    "joined": ("decode.record_seen", "decode.decode_start"),
    "started": ("decode.decode_start", "decode.step_started"),
    "drawn": ("decode.step_started", "decode.first_decode"),
}


class HandoverMetrics(Collector):
    """One histogram per stage; requests that end with their first token are not in them."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        labels = {stage: {"model_name": model_name, "stage": stage} for stage in STAGES}
        self._histograms = {stage: LoopHistogram(NAME, TEXT, labels[stage], BUCKETS) for stage in STAGES}
        registry.register(self)

    def observe(self, attempts: Iterable[Mapping[str, float]]) -> None:
        """Count the stages of a request that is over, from those that the nodes of each of its attempts reported."""
        for times in attempts:
            for stage, (begin, end) in STAGES.items():
                if begin in times and end in times:
                    self._histograms[stage].observe(max(times[end] - times[begin], 0.0))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(NAME, TEXT, labels=("model_name", "stage"))
        for histogram in self._histograms.values():
            histogram.add_to(family)
        yield family
