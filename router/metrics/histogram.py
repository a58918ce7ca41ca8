"""A Prometheus histogram that only the event loop observes: without the lock that prometheus_client takes per value."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """One histogram with fixed labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """`buckets`: ascending upper bounds, without the infinite one. `registry`: None if it is part of a family."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = [float(each) for each in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._created = time.time()
        if registry is not None:
            registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        self.add_to(family)
        yield family

    def add_to(self, family: HistogramMetricFamily) -> None:
        """Add its series to a family with the same labels."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        rows = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), rows, self._sum)
        family.add_sample(f"{self._name}_created", self._labels, self._created)
