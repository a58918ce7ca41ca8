"""When each process and link was impaired, on the clock that every process of the machine shares."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[float, float]


@dataclass
class Timeline:
    """Notes of the run, and for each part (a process or a link) the intervals in which a fault held it."""

    notes: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, tuple[float, Sequence[str]]] = field(default_factory=dict)  # fault -> since, parts
    _closed: list[tuple[str, Interval]] = field(default_factory=list)  # part, interval

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append({"t": time.monotonic(), "event": event, **fields})

    def begin(self, fault: str, parts: Sequence[str], **fields: Any) -> None:
        self._open[fault] = (time.monotonic(), parts)
        self.note("begin", fault=fault, parts=list(parts), **fields)

    def end(self, fault: str, **fields: Any) -> None:
        since, parts = self._open.pop(fault)
        now = time.monotonic()
        self._closed += [(part, (since, now)) for part in parts]
        self.note("end", fault=fault, **fields)

    @property
    def impaired(self) -> set[str]:
        """Parts that some fault holds now."""
        return {part for _, parts in self._open.values() for part in parts}

    def intervals(self, now: float) -> dict[str, list[Interval]]:
        """part -> when it was impaired, in no order."""
        found: dict[str, list[Interval]] = {}
        for part, interval in self._closed:
            found.setdefault(part, []).append(interval)
        for since, parts in self._open.values():
            for part in parts:
                found.setdefault(part, []).append((since, now))
        return found


def healthy_stretches(impaired: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of `window` that no interval touches, in order."""
    stretches: list[Interval] = []
    at, end = window
    for since, until in sorted(impaired):
        if since > at:
            stretches.append((at, min(since, end)))
        at = max(at, until)
        if at >= end:
            break
    if at < end:
        stretches.append((at, end))
    return [each for each in stretches if each[1] > each[0]]
