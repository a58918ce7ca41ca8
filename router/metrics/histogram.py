"""A Prometheus histogram that only the event loop observes: without the lock that prometheus_client takes per value."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.observability.histogram import Histogram


class LoopHistogram(Histogram, Collector):
    """One histogram with fixed labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        registry: CollectorRegistry | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """
        Args:
            bounds: ascending upper bounds, without the infinite one.
            registry: None if it is part of a family.
            aliases: further names under which older dashboards know it.
        """
        super().__init__(bounds)
        self._names = (name, *aliases)
        self._text = text
        self._labels = dict(labels)
        self._created = time.time()
        if registry is not None:
            registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name in self._names:
            family = HistogramMetricFamily(name, self._text, labels=list(self._labels))
            self.add_to(family)
            yield family

    def add_to(self, family: HistogramMetricFamily) -> None:
        """Add its series to a family with the same labels."""
        family.add_metric(list(self._labels.values()), bucket_rows(self.bounds, self.counts), self.sum)
        family.add_sample(f"{family.name}_created", self._labels, self._created)


class BatchHistogram(LoopHistogram):
    """A histogram of values that every request adds: they are collected, and counted in batches.

    Its owner calls `settle` often enough; reports do so themselves.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        registry: CollectorRegistry | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        """For the arguments see LoopHistogram."""
        self._added: list[float] = []
        self.add: Callable[[float], None] = self._added.append
        super().__init__(name, text, labels, bounds, registry, aliases)

    def settle(self) -> None:
        """Count the values that were added since the last call."""
        counts, bounds = self.counts, self.bounds
        for value in self._added:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(self._added)
        self._added.clear()

    def add_to(self, family: HistogramMetricFamily) -> None:
        self.settle()
        super().add_to(family)


def bucket_rows(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return (upper bound, number of values up to it) for each bucket, as Prometheus wants them."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
