"""Resources of a process and its children, sampled over a load, and their growth."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.proc_files import with_children

PAGE = os.sysconf("SC_PAGE_SIZE")
SECONDS = 1.0
POINTS = 24  # samples of a load that a result file shows


@dataclass(frozen=True)
class Sample:
    """Resources at one moment of a load."""

    done: int  # requests or ids so far
    rss: int  # bytes of the process
    children_rss: int
    descriptors: int
    threads: int


def sample(pid: int, done: int) -> Sample:
    """Sample a running process."""
    status = Path(f"/proc/{pid}/status").read_text()
    threads = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Threads:"))
    processes = [int(each.name) for each in with_children(Path(f"/proc/{pid}"))]
    return Sample(
        done, _rss(pid), sum(map(_rss, processes[1:])), len(list(Path(f"/proc/{pid}/fd").iterdir())), threads
    )


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


@dataclass
class Watch:
    """Samples a process every SECONDS while it is used as an async context."""

    pid: int
    done: Callable[[], int]
    samples: list[Sample] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.samples.append(sample(self.pid, self.done()))

    async def _run(self) -> None:
        while True:
            self.samples.append(sample(self.pid, self.done()))
            await asyncio.sleep(SECONDS)


def growth(samples: list[Sample], warm_up: int) -> dict[str, Any]:
    """Return the growth from the first sample after `warm_up` to the last one, and the slope of a fitted line."""
    warm = [each for each in samples if each.done >= warm_up]
    first, last = warm[0], warm[-1]
    return {
        "first": asdict(samples[0]),
        "warm": asdict(first),
        "last": asdict(last),
        "samples": len(warm),
        "grown_kib": (last.rss - first.rss) // 1024,
        "children_grown_kib": (last.children_rss - first.children_rss) // 1024,
        "most_above_warm_kib": (max(each.rss for each in warm) - first.rss) // 1024,
        "bytes_each": round(slope([(each.done, each.rss) for each in warm]), 2),
        "descriptors_grown": last.descriptors - first.descriptors,
        "threads_grown": last.threads - first.threads,
        "done_and_rss_kib": [
            [each.done, each.rss // 1024] for each in samples[:: len(samples) // POINTS + 1]
        ],
    }


def slope(points: list[tuple[int, int]]) -> float:
    """Return the least-squares slope; 0 if all points have the same abscissa."""
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0
