"""Measures the device time of a launch in laps that are read after its completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Starts when it is created."""

    def lap(self) -> None:
        """Mark the end of one part of the launch."""
        ...

    def seconds(self) -> list[float]:
        """Return the seconds of each lap. Call it only after the launch is complete."""
        ...


class HostStopwatch:
    """A stopwatch for CPUs, where work is done when the call returns."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self._times)]


class CudaStopwatch:
    """Events on the current stream: no synchronization, and time before the launch is not counted."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self.lap()

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        return [begin.elapsed_time(end) / 1000 for begin, end in pairwise(self._events)]


def stopwatch_for(device: torch.device) -> Callable[[], Stopwatch]:
    """Choose the stopwatch of a device, once, in build."""
    return CudaStopwatch if device.type == "cuda" else HostStopwatch
