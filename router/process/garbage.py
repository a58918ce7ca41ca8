"""Decides when the router's process runs Python's cyclic garbage collector.

A full collection visits every live object: about 140 per stream, which takes 60 to 120 ms for a thousand streams, and
no client gets a token meanwhile. So it runs while few clients are connected. In a crowd, live objects are exempted from
collections instead: streams that end leave no garbage in cycles, so hardly anything is kept that way, and what is kept
is collected as soon as no request is in flight.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from enum import Enum, auto

# New objects between two collections of the youngest generation, and how many of these precede one of the middle one.
# Most objects of a request live for some milliseconds: with Python's own 700, most collections find them alive.
YOUNG, MIDDLE = 3_500, 2
# Collections of the middle generation (7,000 new objects each) before live objects are exempted: garbage in cycles is
# at most some 80 MiB.
EXEMPT_AFTER = 80
# Memory blocks of Python, some 70 bytes each, by which the process may grow before a full collection of everything runs
# even in a crowd.
MOST_GROWN = 2_000_000
# The interpreter's own full collections, for the case that the event loop has no time for this module.
FULL_COLLECTION_AFTER = 5 * EXEMPT_AFTER
QUIET_CONNECTIONS = 64
INTERVAL = 2.0  # seconds


class Step(Enum):
    """The next action of the collector."""

    NOTHING = auto()
    COLLECT = auto()  # all objects that are not exempt
    EXEMPT = auto()  # all live objects from now on
    COLLECT_EXEMPT = auto()  # also the exempt ones; afterwards those that live are exempt again


def prepare_heap() -> None:
    """Exempt all live objects from collection. Call once when everything is built: they live as long as the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL_COLLECTION_AFTER)


def next_step(pending: int, connections: int, active: int, exempted: bool, grown: int) -> Step:
    """Decide what to do.

    Args:
        pending: collections of the middle generation since the last full one.
        active: requests in flight.
        exempted: whether live objects were exempted since the last COLLECT_EXEMPT.
        grown: memory blocks beyond those that were in use after it.
    """
    if exempted and (not active or grown > MOST_GROWN):
        return Step.COLLECT_EXEMPT
    if pending and connections <= QUIET_CONNECTIONS:
        return Step.COLLECT
    return Step.EXEMPT if pending >= EXEMPT_AFTER else Step.NOTHING


def perform(step: Step) -> None:
    if step is Step.NOTHING:
        return
    if step is Step.EXEMPT:
        # what has become garbage lately
        gc.collect(1)
        gc.freeze()
    elif step is Step.COLLECT_EXEMPT:
        gc.unfreeze()
    # After an exemption there is nothing to visit: it only resets the count of pending collections.
    gc.collect()
    if step is Step.COLLECT_EXEMPT:
        gc.freeze()


async def collect_when_idle(
    connections: Callable[[], int], active: Callable[[], int], interval: float = INTERVAL
) -> None:
    """Do what is due every `interval` seconds. Runs until cancelled. `active`: requests in flight."""
    exempted, settled = False, sys.getallocatedblocks()
    while True:
        await asyncio.sleep(interval)
        grown = sys.getallocatedblocks() - settled
        step = next_step(gc.get_count()[2], connections(), active(), exempted, grown)
        perform(step)
        if step is Step.EXEMPT:
            exempted = True
        elif step is Step.COLLECT_EXEMPT:
            exempted, settled = False, sys.getallocatedblocks()
