"""The station of each attempt of a request, from the events of all processes: where a fault can hit it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Station = Literal["queued", "computing", "transfer", "accepted", "streaming", "finished"]
STATIONS: tuple[Station, ...] = ("queued", "computing", "transfer", "accepted", "streaming", "finished")

# What an event says about the room that it names. Only forward moves count, as events of two processes may cross.
_MOVES: dict[str, Station] = {
    "placed": "queued",
    "chunk": "computing",
    "first_token": "transfer",
    "record_posted": "transfer",
    "accepted": "accepted",
    "tokens": "streaming",
}


@dataclass
class Attempt:
    """One attempt of a request, identified by its room."""

    room: int
    request: str
    prefill: str  # node names
    decode: str
    station: Station = "queued"

    def touches(self, target: str) -> bool:
        """Return whether it needs this process, this link (whose name contains those of its ends) or the disk."""
        if target in ("router", "disk", self.prefill, self.decode):
            return True
        ends = [name for name in (self.prefill, self.decode) if f"-{name}-" in f"-{target}-"]
        return len(ends) == 2 or (len(ends) == 1 and target.startswith("router-"))


@dataclass
class Stations:
    """Follows events in order."""

    attempts: dict[int, Attempt] = field(default_factory=dict)  # room -> current attempt
    _names: dict[str, str] = field(default_factory=dict)  # incarnation -> node

    def follow(self, event: dict[str, Any]) -> None:
        kind, room = event["event"], event["room"]
        if kind == "start":
            self._names[event["incarnation"]] = event["node"]
            if event["node"] == "router":
                self.attempts.clear()
        elif kind == "placed":
            self._end(event["request"])
            prefill, decode = (self._names.get(event[role], "?") for role in ("prefill", "decode"))
            self.attempts[room] = Attempt(room, event["request"], prefill, decode)
        elif kind in ("ended", "failed") and "request" in event:
            self._end(event["request"])
        elif room in self.attempts and kind in _MOVES:
            attempt = self.attempts[room]
            station = "finished" if event.get("finish") else _MOVES[kind]
            if STATIONS.index(station) > STATIONS.index(attempt.station):
                attempt.station = station

    def at(self, target: str) -> Iterator[Station]:
        """Return the stations of all attempts that need this process or link."""
        return (each.station for each in self.attempts.values() if each.touches(target))

    def _end(self, request: str) -> None:
        for room in [room for room, each in self.attempts.items() if each.request == request]:
            del self.attempts[room]


def hits(events: list[dict[str, Any]], faults: list[tuple[float, str, str]]) -> dict[str, dict[str, int]]:
    """Return kind -> station -> requests that were there when a fault (time, kind, target) began; "idle" if none."""
    stations, found = Stations(), dict[str, dict[str, int]]()
    waiting = sorted(faults)
    for event in [*events, {"t": float("inf"), "event": "", "room": 0}]:
        while waiting and waiting[0][0] <= event["t"]:
            _, kind, target = waiting.pop(0)
            counts = found.setdefault(kind, {})
            for station in [str(each) for each in stations.at(target)] or ["idle"]:
                counts[station] = counts.get(station, 0) + 1
        stations.follow(event)
    return found
