"""Full garbage collections run while few clients are connected; in a crowd live objects are exempted from them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.process.garbage import (
    EXEMPT_AFTER,
    FULL_COLLECTION_AFTER,
    MOST_GROWN,
    QUIET_CONNECTIONS,
    Step,
    collect_when_idle,
    next_step,
)
from tests.fakes.waiting import eventually


@pytest.fixture
def full_collections() -> Iterator[list[str]]:
    """Yield a list that grows with every full collection."""
    found: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(phase)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


async def test_it_collects_while_few_are_connected_and_not_in_a_crowd(full_collections: list[str]) -> None:
    connected, asked = QUIET_CONNECTIONS + 1, 0

    def connections() -> int:
        nonlocal asked
        asked += 1
        # Simulates that new objects survived: otherwise there is nothing to collect.
        if not gc.get_count()[2]:
            gc.collect(1)
        return connected

    gc.disable()
    # Other tests of this process may have left more pending collections than a crowd tolerates.
    gc.collect()
    full_collections.clear()
    task = asyncio.create_task(collect_when_idle(connections, lambda: connected, 0.0))
    try:
        gc.collect(1)
        await eventually(lambda: asked > 3)
        assert not full_collections
        connected = QUIET_CONNECTIONS
        await eventually(lambda: full_collections)
    finally:
        task.cancel()
        gc.enable()


@pytest.mark.parametrize(
    ("pending", "connections", "active", "exempted", "grown", "step"),
    [
        (0, 1, 1, False, 0, Step.NOTHING),
        (1, QUIET_CONNECTIONS, 1, False, 0, Step.COLLECT),
        (EXEMPT_AFTER - 1, QUIET_CONNECTIONS + 1, 1, False, 0, Step.NOTHING),
        (EXEMPT_AFTER, QUIET_CONNECTIONS + 1, 1, False, 0, Step.EXEMPT),
        (EXEMPT_AFTER, QUIET_CONNECTIONS, 1, False, 0, Step.COLLECT),
        (EXEMPT_AFTER, 1000, 1, True, MOST_GROWN, Step.EXEMPT),
        (0, 1000, 1, True, MOST_GROWN + 1, Step.COLLECT_EXEMPT),
        (0, 1000, 1, False, MOST_GROWN + 1, Step.NOTHING),
        (0, 1000, 0, True, 0, Step.COLLECT_EXEMPT),
        (0, 1000, 0, False, 0, Step.NOTHING),
        (1, QUIET_CONNECTIONS, 1, True, 0, Step.COLLECT),
    ],
)
def test_what_is_due(
    pending: int, connections: int, active: int, exempted: bool, grown: int, step: Step
) -> None:
    assert next_step(pending, connections, active, exempted, grown) is step


EXEMPTION = """
import gc, weakref, router.process.garbage as c
from router.process.garbage import Step, perform
c.prepare_heap()
gc.disable()
class Node: pass
def cycle():
    node = Node(); node.me = node
    return node
kept, lost = cycle(), cycle()
dead = weakref.ref(lost)
gc.collect(1)
perform(Step.EXEMPT)
visited = len(gc.get_objects())
count = gc.get_count()[2]
del lost
perform(Step.COLLECT)
remains = dead() is not None
perform(Step.COLLECT_EXEMPT)
print(visited < 1_000, count, remains, dead() is None, kept.me is kept, len(gc.get_objects()) < 1_000)
"""


def test_exempt_objects_are_not_visited_and_their_garbage_is_collected_later() -> None:
    done = subprocess.run([sys.executable, "-c", EXEMPTION], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "True", "True", "True", "True"]


def test_the_heap_of_the_start_is_not_visited_again() -> None:
    program = (
        "import gc, router.process.garbage as c; c.prepare_heap(); "
        "print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000, gc.get_threshold()[2])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", str(FULL_COLLECTION_AFTER)]
