"""Young objects are collected a few at a time, all objects while no request is in flight, those of the start never."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.process.garbage import (
    BLOCKS_PER_REQUEST,
    MAX_GROWN,
    collect_when_idle,
    collect_young,
    full_collection_is_due,
)
from tests.fakes.waiting import eventually


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Yield a list of the generations that were collected; Python itself collects nothing meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.disable()
    # Other tests of this process may have left pending collections.
    gc.collect()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


async def test_it_collects_only_while_no_request_is_in_flight(collections: list[int]) -> None:
    in_flight, asked = 1, 0

    def active() -> int:
        nonlocal asked
        asked += 1
        return in_flight

    # Simulates that new objects survived: otherwise there is nothing to collect.
    gc.collect(1)
    task = asyncio.create_task(collect_when_idle(active, 0.0))
    try:
        await eventually(lambda: asked > 3)
        assert 2 not in collections
        in_flight = 0
        await eventually(lambda: 2 in collections)
    finally:
        task.cancel()


@pytest.mark.parametrize(
    ("pending", "active", "grown", "due"),
    [
        (0, 0, 0, False),
        (1, 0, 0, True),
        (10_000, 1, 0, False),
        (0, 0, MAX_GROWN + 1, True),
        (0, 1, MAX_GROWN + BLOCKS_PER_REQUEST, False),
        (0, 1, MAX_GROWN + BLOCKS_PER_REQUEST + 1, True),
        # the growth is that of live requests
        (0, 1000, MAX_GROWN + 1000 * BLOCKS_PER_REQUEST, False),
    ],
)
def test_what_is_due(pending: int, active: int, grown: int, due: bool) -> None:
    assert full_collection_is_due(pending, active, grown) is due


async def test_a_young_object_is_visited_once_and_soon(collections: list[int]) -> None:
    """Afterwards it is an old one, which only full collections visit."""
    active = 1
    task = asyncio.create_task(collect_young(lambda: active, 0.0, 0.0))
    try:
        kept: list[list[int]] = [[] for _ in range(100)]
        await eventually(lambda: len(collections) > 3)
        assert set(collections) == {1}
        young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation=generation)}
        assert young.isdisjoint(map(id, kept))
        active = 0
        await asyncio.sleep(0)
        seen = len(collections)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(collections) == seen, "nothing is collected without requests"
    finally:
        task.cancel()


HEAP = """
import gc, weakref, router.process.garbage as c
class Node: pass
def cycle():
    node = Node(); node.me = node
    return node
started = [cycle() for _ in range(10_000)]
c.prepare_heap()
lost = cycle()
dead = weakref.ref(lost)
gc.collect(1)
del lost
visited = len(gc.get_objects())
# The interpreter's own collections: never a full one, whatever lives.
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
kept = [[] for _ in range(200_000)]
own, remains = len(full), dead() is not None
gc.collect()
print(visited < 1_000, own, remains, dead() is None, gc.get_freeze_count() > 10_000, started[0].me is started[0])
"""


def test_the_heap_of_the_start_is_not_visited_again_and_later_garbage_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "True", "True", "True", "True"]
