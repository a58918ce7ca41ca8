"""A stopwatch measures the laps of a launch."""

from __future__ import annotations

import time

import torch

from common.node.stopwatch import HostStopwatch, stopwatch_for


def test_one_time_for_each_lap() -> None:
    watch = HostStopwatch()
    time.sleep(0.02)
    watch.lap()
    watch.lap()
    first, second = watch.seconds()
    assert first >= 0.02
    assert second >= 0


def test_the_cpu_has_the_host_s() -> None:
    assert stopwatch_for(torch.device("cpu")) is HostStopwatch
