"""Writes series as text, a few samples per turn of the event loop, since hundreds of nodes have many thousands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

OPENMETRICS = "application/openmetrics-text"
END = "# EOF\n"  # of an answer in the OpenMetrics format
# Samples after which other work gets a turn: some 8 us each.
SAMPLES_PER_TURN = 200


@dataclass(frozen=True, slots=True)
class _Single(Collector):
    """A collector of one family."""

    family: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.family,)


class Exposition:
    """One answer to Prometheus. Families with the same name are merged."""

    def __init__(self, accept: str) -> None:
        """Choose the format: OpenMetrics if the client's header `accept` names that, otherwise Prometheus's text."""
        self._openmetrics = OPENMETRICS in accept
        self._families: dict[str, list[str]] = {}
        self._samples = 0  # of this turn

    async def add(self, families: Iterable[Metric]) -> None:
        """Add families. Those that are made lazily are made in the turn in which they are written."""
        for family in families:
            text = self._text(family)
            if family.name in self._families:
                self._families[family.name] += (
                    line for line in text.splitlines(True) if not line.startswith("#")
                )
            else:
                self._families[family.name] = [text]
            self._samples += len(family.samples) + 1
            if self._samples >= SAMPLES_PER_TURN:
                self._samples = 0
                await asyncio.sleep(0)

    def finished(self) -> tuple[bytes, str]:
        """Return the answer and its media type."""
        text = "".join(part for parts in self._families.values() for part in parts)
        if self._openmetrics:
            return (text + END).encode(), openmetrics.CONTENT_TYPE_LATEST
        return text.encode(), CONTENT_TYPE_PLAIN_0_0_4

    def _text(self, family: Metric) -> str:
        if not self._openmetrics:
            return generate_latest(_Single(family)).decode()
        # With its default escaping, prometheus_client writes "_" for the ":" in the names of samples.
        shown: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            _Single(family), escaping=openmetrics.ALLOWUTF8
        )
        return shown.decode().removesuffix(END)
