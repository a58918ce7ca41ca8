"""Measures what one forward takes on its device, without waiting for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    """Runs from its construction."""

    def stop(self) -> None:
        """Stop when the work launched since then is done."""
        ...

    def ms(self) -> float:
        """Return the milliseconds. May be called only once that work is complete."""
        ...


class HostStopwatch:
    """For work that is done when the call that launches it returns, as on a CPU."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._begun

    def ms(self) -> float:
        return 1e3 * self._seconds


class CudaStopwatch:
    """Two events on the current stream: the time begins when the device has finished all earlier work."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def ms(self) -> float:
        return float(self._begin.elapsed_time(self._end))


def start_stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
