"""Full collections run at the end of a turn, not too often, and Python starts none by itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.garbage import INTERVAL, NEVER, PENDING, FullCollections


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_a_full_collection_needs_pending_ones_and_time() -> None:
    pending, collected = [PENDING - 1], []
    collections = FullCollections(lambda: pending[0], lambda: collected.append(pending[0]))
    collections.end_turn(100.0)
    assert not collected, "too little has survived"
    pending[0] = PENDING
    collections.end_turn(100.0)
    assert collected == [PENDING]
    collections.end_turn(100.0 + INTERVAL / 2)
    assert len(collected) == 1, "the last one was a moment ago"
    collections.end_turn(100.0 + INTERVAL)
    assert len(collected) == 2


def test_python_starts_no_full_collection_once_turns_do() -> None:
    young, middle, _ = gc.get_threshold()
    FullCollections(lambda: 0).end_turn(0.0)
    assert gc.get_threshold() == (young, middle, NEVER)


def test_garbage_in_cycles_is_found() -> None:
    before = len(gc.garbage)
    gc.collect()
    collections = FullCollections()
    for _ in range(PENDING):
        gc.collect(1)
    assert gc.get_count()[2] >= PENDING
    collections.end_turn(INTERVAL)
    assert gc.get_count()[2] == 0, "a full collection has run"
    assert len(gc.garbage) == before
