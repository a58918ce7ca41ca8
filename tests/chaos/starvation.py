"""Measures how long the cluster's processes were ready to run but got no processor, which is no fault of theirs.

A machine that is shared, or smaller than the cluster, delays everything. The bound of a hang applies to a machine that
runs what is ready, so the checker subtracts the time that the slowest process spent in the run queue.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.chaos.timeline import Timeline

INTERVAL = 0.25
WORTH_NOTING = 0.02  # seconds per interval


def waited(pid: int) -> float:
    """Return the seconds that the main thread of a process has spent in the run queue; 0 once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


async def watch(timeline: Timeline, pids: Callable[[], Mapping[str, int]]) -> None:
    """Record starved intervals until cancelled. `pids` returns the processes on which requests depend now."""
    before: dict[int, float] = {}
    since = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL)
        now = time.monotonic()
        current = {pid: waited(pid) for pid in [os.getpid(), *pids().values()]}
        worst = max((value - before[pid] for pid, value in current.items() if pid in before), default=0.0)
        worst = max(worst, now - since - 2 * INTERVAL)  # this process itself was late
        if worst > WORTH_NOTING:
            timeline.note("starved", since=since, until=now, seconds=min(worst, now - since))
        before, since = current, now
