"""Decides when the router's process runs Python's cyclic garbage collector.

A collection halts the event loop while it visits objects, and no client gets a token meanwhile. Three rules keep it
below 5 ms:

- What is alive after the start is never visited again: it would take 150 ms.
- Young objects are collected every 25 ms while requests are in flight. Python itself collects them once there are
  thousands more of them than objects freed. Where as many streams end as begin, that takes seconds, and then all
  streams that began meanwhile are visited at once.
- A full collection visits all that requests and connections have made: about 140 objects per stream, 10 ms for 60
  streams and 60 to 120 ms for a thousand. So it runs while no request is in flight. Streams that end leave no garbage
  in cycles: a router that is never idle can do without it, unless memory grows.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable

from common.garbage import NEVER

# New objects between two collections of the youngest generation, and how many of these precede one of the middle one:
# for bursts between two collections of young objects.
YOUNG, MIDDLE = 3_500, 2
# Memory blocks of Python, some 70 bytes each, by which the process may grow before a full collection runs although
# requests are in flight, and the blocks of a live request, which are not garbage.
MAX_GROWN, BLOCKS_PER_REQUEST = 2_000_000, 400
INTERVAL = 2.0  # seconds
# Seconds between two collections of young objects while requests are in flight, and while none is.
YOUNG_INTERVAL, IDLE_INTERVAL = 0.025, 0.25


def prepare_heap() -> None:
    """Exempt all live objects from collection. Call once when everything is built: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


def full_collection_is_due(pending: int, active: int, grown: int) -> bool:
    """
    Args:
        pending: collections of the middle generation since the last full one.
        active: requests in flight.
        grown: memory blocks beyond those that were in use after the last full collection.
    """
    return bool(pending and not active) or grown > MAX_GROWN + active * BLOCKS_PER_REQUEST


async def collect_when_idle(active: Callable[[], int], interval: float = INTERVAL) -> None:
    """Run a full collection if it is due, every `interval` seconds until cancelled. `active`: requests in flight."""
    settled = sys.getallocatedblocks()
    while True:
        await asyncio.sleep(interval)
        grown = sys.getallocatedblocks() - settled
        if full_collection_is_due(gc.get_count()[2], active(), grown):
            gc.collect()
            settled = sys.getallocatedblocks()


async def collect_young(
    active: Callable[[], int], interval: float = YOUNG_INTERVAL, idle_interval: float = IDLE_INTERVAL
) -> None:
    """Collect the objects of the last `interval` seconds again and again, until cancelled.

    `active`: requests in flight; without any, nothing is collected.
    """
    while True:
        busy = active() > 0
        if busy:
            gc.collect(1)
        await asyncio.sleep(interval if busy else idle_interval)
