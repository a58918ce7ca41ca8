"""Decides when the router's process runs Python's cyclic garbage collector.

A full collection visits every live object: about 140 per stream, which takes 60 to 120 ms for a thousand streams, and
no client gets a token meanwhile. So it runs while few clients are connected, and otherwise only after many new objects.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

# Collections of the middle generation (7,000 new objects each) before a full one: garbage in cycles is at most some
# 80 MiB, and 4,000 streams begin without a full collection.
FULL_COLLECTION_AFTER = 80
QUIET_CONNECTIONS = 64
INTERVAL = 2.0  # seconds


def prepare_heap() -> None:
    """Exempt all live objects from collection. Call once when everything is built: they live as long as the process."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


async def collect_when_quiet(connections: Callable[[], int], interval: float = INTERVAL) -> None:
    """Run a full collection every `interval` seconds while few clients are connected. Runs until cancelled."""
    while True:
        await asyncio.sleep(interval)
        # Zero means that no middle generation was collected since the last full collection.
        if gc.get_count()[2] and connections() <= QUIET_CONNECTIONS:
            gc.collect()
