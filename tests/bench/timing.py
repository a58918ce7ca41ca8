"""Times device work: calls over rotating inputs are recorded in one graph, whose replays are timed by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

CALLS = 24  # recorded in one graph, so that its launch overhead does not count
REPLAYS = 11
L2_BYTES = 50 << 20


def graph_us(calls: Sequence[Callable[[], object]], count: int = CALLS) -> float:
    """Return the median microseconds of one call; `calls` do the same work on different inputs."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    times = []
    for _ in range(REPLAYS + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 1000 * statistics.median(times[2:]) / count


def kernels_us(call: Callable[[], object], count: int) -> dict[str, float]:
    """Return the microseconds of each kernel that `call` launches, divided by `count`, by name.

    Kernels whose launches overlap are counted for as long as each was resident, so the sum may exceed `graph_us`.
    """
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    found = {each.key: each.self_device_time_total / REPLAYS / count for each in profile.key_averages()}
    return {name: us for name, us in found.items() if us > 0}


def wake(seconds: float = 1.0) -> None:
    """Keep the GPU busy before a short measurement: after idling, its clocks are low and take a while to rise."""
    a = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize()


def sets_for(nbytes: int, most: int = 8) -> int:
    """Return how many input sets of `nbytes` exceed the L2 cache several times, at most `most`."""
    return max(1, min(most, -(-4 * L2_BYTES // nbytes)))


def copy_bandwidth() -> float:
    """Return the bytes per second of a device copy, counting reads and writes."""
    source = torch.randn(1 << 29, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    # Not copy_, which a graph runs on the slower copy engines.
    return 2e6 * source.nbytes / graph_us([lambda: torch.neg(source, out=target)], 5)


def matmul_rate(size: int = 8192) -> float:
    """Return the operations per second of a bf16 product of random matrices."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2e6 * size**3 / graph_us([lambda: torch.mm(a, b, out=out)], 5)
