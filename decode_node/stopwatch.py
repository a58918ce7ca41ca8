"""Where the time of a launch goes, on the device: laps that are read after its completion."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Starts when it is made."""

    def lap(self) -> None:
        """One part of the launch has been given to the device."""
        ...

    def seconds(self) -> list[float]:
        """Of each lap; only after the launch is complete."""
        ...


class HostStopwatch:
    """Where work is done when the call returns: CPU."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in pairwise(self._times)]


class CudaStopwatch:
    """Events on the current stream: nothing waits, and time before the launch is not counted."""

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
    """Chosen once, in build."""
    return CudaStopwatch if device.type == "cuda" else HostStopwatch
