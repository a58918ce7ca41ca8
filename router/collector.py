"""When Python looks for garbage in cycles in the router's process.

A full collection visits every object that lives: some 140 per stream, 60 to 120 ms for a thousand streams, in which no
other client gets a token. So it runs while few clients are connected, and otherwise only after so many new objects that
garbage could be worth it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

# Collections of the middle generation (7,000 new objects each) before a full one: garbage in cycles is at most some
# 50 MiB, and 2,500 streams begin without a full collection.
FULL_COLLECTION_AFTER = 50
QUIET_CONNECTIONS = 64
INTERVAL = 10.0  # seconds


def prepare_heap() -> None:
    """Called once when everything is built: what lives now lives as long as the process, and is not visited again."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


async def collect_when_quiet(connections: Callable[[], int], interval: float = INTERVAL) -> None:
    """Collect from time to time while a collection disturbs few clients. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(interval)
        # Nothing to do unless a collection of the middle generation has happened since the last full one.
        if gc.get_count()[2] and connections() <= QUIET_CONNECTIONS:
            gc.collect()
