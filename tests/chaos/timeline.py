"""When each process and link was impaired, on the clock that every process of the machine shares."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Interval = tuple[float, float]


@dataclass
class Timeline:
    """Notes of the run: the beginning and end of each fault, and the parts (processes, links) that it affects."""

    notes: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[str, Sequence[str]] = field(default_factory=dict)  # fault -> its parts

    def note(self, event: str, **fields: Any) -> None:
        self.notes.append({"t": time.monotonic(), "event": event, **fields})

    def begin(self, fault: str, parts: Sequence[str], **fields: Any) -> None:
        self._open[fault] = parts
        self.note("begin", fault=fault, parts=list(parts), **fields)

    def end(self, fault: str, **fields: Any) -> None:
        del self._open[fault]
        self.note("end", fault=fault, **fields)

    def held_by_others(self, fault: str) -> set[str]:
        """Return the parts that another fault affects now."""
        return {part for name, parts in self._open.items() if name != fault for part in parts}

    def starved_since(self, since: float) -> float:
        """Return the seconds since then in which the machine did not run what was ready."""
        notes = [note for note in self.notes if note["event"] == "starved" and note["since"] >= since]
        return float(sum(note["seconds"] for note in notes))

    @property
    def impaired(self) -> set[str]:
        """Return the parts that some fault affects now."""
        return {part for parts in self._open.values() for part in parts}


def healthy_stretches(impaired: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return the parts of `window` that no interval touches, in order."""
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
