"""What happened to a request and when: seconds since it was received. The last few hundred can be asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

KEPT = 512


class Timeline:
    """Stages of one request. A node's own stages are anchored at the moment the request was placed there."""

    def __init__(self, request_id: str, now: float) -> None:
        self.request_id = request_id
        self._started = now
        self.stages: dict[str, float] = {"received": 0.0}
        self.nodes: list[dict[str, str]] = []  # per attempt
        self.outcome = "running"

    def mark(self, stage: str, now: float) -> None:
        """The first time counts, except for `placed`, which is the latest attempt's."""
        if stage == "placed" or stage not in self.stages:
            self.stages[stage] = now - self._started

    def anchor(self, stages: Mapping[str, float], prefix: str) -> None:
        placed = self.stages.get("placed", 0.0)
        for stage, seconds in stages.items():
            self.stages[f"{prefix}.{stage}"] = placed + seconds

    def report(self) -> dict[str, Any]:
        ordered = sorted(self.stages.items(), key=lambda item: item[1])
        return {
            "request_id": self.request_id,
            "outcome": self.outcome,
            "nodes": self.nodes,
            "stages": {stage: round(seconds, 6) for stage, seconds in ordered},
        }


class Timelines:
    """Bounded memory of recent timelines by request id."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        self._recent[timeline.request_id] = timeline
        self._recent.move_to_end(timeline.request_id)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        timeline = self._recent.get(request_id)
        return timeline.report() if timeline is not None else None
