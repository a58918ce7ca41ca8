"""The router process with a probe of its event loop: measures how long clients wait, without delays by the machine.

    python -m tests.bench.loop_probe FILE --cluster CLUSTER.yaml

A callback is due every TICK seconds. How late it runs, minus the time in which the loop's thread was ready and another
process had the processor (/proc/self/schedstat), is a stall of the loop. Each stall of at least NOTED seconds is
appended to FILE as a line of JSON, with the garbage collections in it and the stack of the loop's thread if the stall
lasted long enough to be sampled.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import msgspec

import router.__main__ as program
from common.config import Resolved
from common.config.router_processes import RouterProcess
from common.observability.logs import Log
from common.process import run_command
from router.app import RouterApp

TICK = 0.002  # seconds
NOTED = 0.005
SAMPLED = 0.004  # after this time the watcher samples the stack
SWITCH = 0.0005  # seconds for which the loop's thread may keep the interpreter while the watcher waits for it
LONG_COLLECTION = 0.001  # seconds; shorter ones are not named
FRAMES_SHOWN = 8


class Stall(msgspec.Struct, frozen=True):
    """A stall. Times are of CLOCK_MONOTONIC, which all processes of a host share."""

    since: float
    until: float
    seconds: float  # without the time of other processes
    late: float  # including it
    cpu: float  # seconds of computation in the loop's thread
    stack: list[str]  # innermost call last; empty if not sampled
    # (generation, CPU seconds) of its long garbage collections
    collections: list[tuple[int, float]] = []
    # of the loop's thread: page faults that read from a disk, others, and times at which it waited for something
    major_faults: int = 0
    minor_faults: int = 0
    waits: int = 0
    # since the stall before: seconds, summed over processors, for which this container had used up its quota
    throttled: float = 0.0


# The file of a container's own control group, version 2 or 1; the field of the sum; its unit in seconds.
_QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec", 1e-6),
    (Path("/sys/fs/cgroup/cpu/cpu.stat"), "throttled_time", 1e-9),
)


def throttled_seconds() -> float:
    """Return how long processes of this container have been held up by its quota; 0 where nothing says so."""
    for file, field, unit in _QUOTAS:
        if file.exists():
            lines = dict(line.split() for line in file.read_text().splitlines())
            return int(lines.get(field, 0)) * unit
    return 0.0


class LoopProbe:
    """The probe; it is started on the running event loop."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("ab", buffering=0)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._schedstat = os.open("/proc/self/schedstat", os.O_RDONLY)
        self._due = time.monotonic() + TICK
        self._waited = self._run_queue_seconds()
        self._cpu = time.thread_time()
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)
        self._throttled = throttled_seconds()
        self._stack: list[str] = []
        self._collections: list[tuple[int, float]] = []
        self._collecting = 0.0
        sys.setswitchinterval(SWITCH)
        gc.callbacks.append(self._collection)
        threading.Thread(target=self._watch, daemon=True).start()
        self._loop.call_later(TICK, self._tick)

    def _run_queue_seconds(self) -> float:
        """Return the seconds for which the main thread has been ready to run without a processor."""
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9

    def _tick(self) -> None:
        now, waited, cpu = time.monotonic(), self._run_queue_seconds(), time.thread_time()
        usage, before = resource.getrusage(resource.RUSAGE_THREAD), self._usage
        late = now - self._due
        seconds = late - (waited - self._waited)
        if seconds >= NOTED:
            throttled = throttled_seconds()
            stall = Stall(
                self._due,
                now,
                seconds,
                late,
                cpu - self._cpu,
                self._stack,
                self._collections,
                usage.ru_majflt - before.ru_majflt,
                usage.ru_minflt - before.ru_minflt,
                usage.ru_nvcsw - before.ru_nvcsw,
                throttled - self._throttled,
            )
            self._throttled = throttled
            self._file.write(msgspec.json.encode(stall) + b"\n")
        self._stack, self._collections = [], []
        self._due, self._waited, self._cpu, self._usage = now + TICK, waited, cpu, usage
        self._loop.call_later(TICK, self._tick)

    def _collection(self, phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        elif (seconds := time.thread_time() - self._collecting) >= LONG_COLLECTION:
            self._collections.append((found["generation"], seconds))

    def _watch(self) -> None:
        while True:
            time.sleep(SAMPLED / 2)
            if time.monotonic() - self._due > SAMPLED and not self._stack:
                frame = sys._current_frames().get(self._thread)
                self._stack = _described(frame)


def _described(frame: FrameType | None) -> list[str]:
    stack = traceback.extract_stack(frame)[-FRAMES_SHOWN:] if frame is not None else []
    return [f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in stack]


def stalls(file: Path, since: float, until: float) -> list[Stall]:
    """Return the stalls that overlap an interval, longest first."""
    decoder = msgspec.json.Decoder(Stall)
    found = [decoder.decode(line) for line in file.read_bytes().splitlines()]
    return sorted(
        (stall for stall in found if stall.until >= since and stall.since <= until),
        key=lambda stall: -stall.seconds,
    )


def main() -> None:
    file = Path(sys.argv.pop(1))
    build = vars(program)["build"]

    def build_with_probe(resolved: Resolved, process: RouterProcess, log: Log) -> RouterApp:
        app = build(resolved, process, log)
        LoopProbe(file)
        return app

    with patch.object(program, "build", build_with_probe):
        run_command(program.main, "launch_router")


if __name__ == "__main__":
    main()
