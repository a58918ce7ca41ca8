"""Full garbage collections run only while few clients are connected."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from router.collector import FULL_COLLECTION_AFTER, QUIET_CONNECTIONS, collect_when_quiet
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
        gc.collect(1)
        return connected

    gc.disable()
    task = asyncio.create_task(collect_when_quiet(connections, 0.0))
    try:
        gc.collect(1)
        await eventually(lambda: asked > 3)
        assert not full_collections
        connected = QUIET_CONNECTIONS
        await eventually(lambda: full_collections)
    finally:
        task.cancel()
        gc.enable()


def test_the_heap_of_the_start_is_not_visited_again() -> None:
    program = (
        "import gc, router.collector as c; c.prepare_heap(); "
        "print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000, gc.get_threshold()[2])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", str(FULL_COLLECTION_AFTER)]
