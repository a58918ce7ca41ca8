"""Records what happened to a request and when, in seconds since it was received. Keeps the last few hundred."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import msgspec

from common.messages.generation import FINISH_LENGTH, FINISH_STOP
from router.metrics.trace_context import TraceContext

KEPT = 512
_SECONDS = itemgetter(1)


class Timeline:
    """Stages of one request. Stages that a node reports are relative to the placement of the request there."""

    def __init__(self, request_id: str, now: float, client: str = "") -> None:
        self.request_id = request_id
        self.client = client  # API key id or address
        self._started = now
        self._marks: dict[str, float] = {"received": 0.0}  # the router's own stages
        self.attempts: list[dict[str, float]] = []  # stages that the nodes of each attempt report
        self.nodes: list[dict[str, str]] = []  # node names of each attempt
        self.outcome = "running"
        self.trace: TraceContext | None = None  # None: not traced
        # Tokens per step that verified drafts, over all attempts; None without such steps, and until it is over.
        self.accept_length: float | None = None

    @classmethod
    def entered(
        cls, request_id: str, arrived: float | None, client: str, trace: TraceContext | None
    ) -> Timeline:
        """Begin with a request that is token ids now. `arrived`: monotonic seconds; None if it was never text."""
        now = time.monotonic()
        timeline = cls(request_id, now if arrived is None else arrived, client)
        timeline.trace = trace
        timeline._marks["entered"] = now - timeline._started
        return timeline

    @property
    def stages(self) -> dict[str, float]:
        """All stages; of those that several attempts have, the latest attempt's."""
        stages = self._marks
        for attempt in self.attempts:
            stages = stages | attempt
        return stages

    @property
    def completed(self) -> bool:
        """True if the answer ended as it should: with a stop, or at its greatest length."""
        return self.outcome in (FINISH_STOP, FINISH_LENGTH)

    @property
    def final_stages(self) -> dict[str, float]:
        """The router's own stages and those of the last attempt only."""
        return self._marks | (self.attempts[-1] if self.attempts else {})

    def mark(self, stage: str, now: float) -> None:
        """Record a stage. Its first time counts, except for `placed`, where the latest attempt counts."""
        if stage == "placed" or stage not in self._marks:
            self._marks[stage] = now - self._started

    def age(self, now: float) -> float:
        """Return the seconds since the request was received."""
        return now - self._started

    def begin_attempt(self) -> int:
        """Add an attempt and return its index."""
        self.attempts.append({})
        return len(self.attempts) - 1

    def anchor(self, attempt: int, stages: Mapping[str, float], prefix: str, placed: float) -> None:
        """Add a node's stages to an attempt; they count from the moment `placed`."""
        for stage, seconds in stages.items():
            self.attempts[attempt][f"{prefix}.{stage}"] = placed - self._started + seconds

    def report(self) -> dict[str, Any]:
        ordered = sorted(self.stages.items(), key=_SECONDS)
        report: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "outcome": self.outcome,
            "nodes": self.nodes,
            # To microseconds. `round` takes three times as long, and this runs for every request.
            "stages": {stage: int(seconds * 1e6 + 0.5) / 1e6 for stage, seconds in ordered},
        }
        if self.accept_length is not None:
            report["accept_length"] = round(self.accept_length, 3)
        return report


class Placed(msgspec.Struct, frozen=True):
    """One attempt of a request."""

    timeline: Timeline
    attempt: int  # its index in the timeline
    at: float  # monotonic seconds
    prefill: str  # incarnation
    decode: str


class Timelines:
    """Recent timelines by request id, and the rooms for which nodes report stages. Both are bounded.

    A closed room is kept for a while, because the last stages of a node may arrive after the last token.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, Timeline] = OrderedDict()
        self._open: dict[int, Placed] = {}
        self._closed: OrderedDict[int, Placed] = OrderedDict()

    @property
    def rooms(self) -> int:
        """Number of rooms in memory."""
        return len(self._open) + len(self._closed)

    def open(self, room: int, timeline: Timeline, now: float, prefill: str, decode: str) -> None:
        """Begin an attempt."""
        self._open[room] = Placed(timeline, timeline.begin_attempt(), now, prefill, decode)

    def close(self, room: int) -> None:
        """End an attempt."""
        placed = self._open.pop(room, None)
        if placed is not None:
            self._closed[room] = placed
            while len(self._closed) > KEPT:
                self._closed.popitem(last=False)

    def anchor(self, room: int, incarnation: str, stages: Mapping[str, float]) -> None:
        """Add the stages that a node reports. Rooms of other nodes are ignored."""
        placed = self._open.get(room) or self._closed.get(room)
        if placed is not None and incarnation in (placed.prefill, placed.decode):
            prefix = "prefill" if incarnation == placed.prefill else "decode"
            placed.timeline.anchor(placed.attempt, stages, prefix, placed.at)

    def add(self, timeline: Timeline) -> None:
        self._recent[timeline.request_id] = timeline
        self._recent.move_to_end(timeline.request_id)
        while len(self._recent) > KEPT:
            self._recent.popitem(last=False)

    def get(self, request_id: str) -> dict[str, Any] | None:
        timeline = self._recent.get(request_id)
        return timeline.report() if timeline is not None else None

    def latest(self, count: int, client: str | None, now: float) -> list[dict[str, Any]]:
        """Return the reports of the last `count` requests, newest first, with their age in seconds.

        `client`: only requests of this client; None for those of all clients.
        """
        mine = (each for each in reversed(self._recent.values()) if client in (None, each.client))
        return [{**timeline.report(), "age": round(timeline.age(now), 3)} for timeline in islice(mine, count)]
