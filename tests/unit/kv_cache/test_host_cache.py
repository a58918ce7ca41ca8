"""Bookkeeping of host memory, step by step: what is found, what a write receives, and what comes back.

test_host_cache_model.py checks that nothing wrong is found; these tests also say what has to be found.
"""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from common.kv_cache.host_cache import HostCache
from common.kv_cache.page_space import as_keys
from common.kv_cache.radix_cache import Keys

BLOCK = 2  # tokens


def store(cache: HostCache, keys: Keys, states: Sequence[int] = (), salt: bytes = b"") -> None:
    """Write what is missing of a prefix."""
    write = cache.reserve(keys, salt, states)
    if write is not None:
        cache.commit(write)
    cache.check_integrity()
    assert cache.writing_blocks == cache.tree.snapshots.writing == 0


def found(cache: HostCache, keys: Keys, tokens: int | None = None, salt: bytes = b"") -> int:
    """Return the number of blocks that a prompt of these keys finds."""
    prefix = cache.find(keys, len(keys) if tokens is None else tokens, salt)
    if prefix is None:
        return 0
    cache.release(prefix)
    return len(prefix.blocks)


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6))
@settings(max_examples=50)
def test_all_that_is_stored_is_found_while_there_is_room(texts: list[list[int]]) -> None:
    cache = HostCache(BLOCK, num_blocks=24)
    for text in texts:
        keys = as_keys(text[: len(text) // BLOCK * BLOCK])
        store(cache, keys)
        assert cache.reserve(keys, b"") is None, "nothing is missing"
    whole = {tuple(text[:end]) for text in texts for end in range(BLOCK, len(text) + 1, BLOCK)}
    assert [found(cache, as_keys(text)) for text in texts] == [len(text) // BLOCK for text in texts]
    assert cache.cached_blocks == len(whole)
    assert (cache.available_blocks, cache.evicted_blocks) == (24, 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (2, 1), (5, 2), (6, 3), (100, 3)])
def test_a_prefix_ends_at_the_limit_of_the_request(tokens: int, blocks: int) -> None:
    cache = HostCache(BLOCK, num_blocks=4)
    store(cache, as_keys(range(6)))
    assert found(cache, as_keys(range(7)), tokens) == blocks


def test_the_slower_of_two_writes_of_one_prefix_gives_its_blocks_back() -> None:
    cache = HostCache(BLOCK, num_blocks=6)
    writes = [cache.reserve(as_keys(range(4)), b""), cache.reserve(as_keys(range(6)), b"")]
    for write in writes:
        assert write is not None
        cache.commit(write)
        cache.check_integrity()
    assert (cache.cached_blocks, cache.writing_blocks, cache.available_blocks) == (3, 0, 6)
    assert found(cache, as_keys(range(6))) == 3


def test_replaced_blocks_are_counted() -> None:
    cache = HostCache(BLOCK, num_blocks=3)
    store(cache, as_keys([1, 1]))
    store(cache, as_keys([2, 2, 2, 2]))
    assert cache.evicted_blocks == 0
    store(cache, as_keys([3, 3, 3, 3]))
    assert cache.evicted_blocks == 2
    assert found(cache, as_keys([1, 1])) == 0, "used least recently"
    assert found(cache, as_keys([2, 2, 2, 2])) == 1, "the tail goes first"


def test_writes_leave_spare_blocks_to_others() -> None:
    cache = HostCache(BLOCK, num_blocks=5, spare_blocks=2)
    store(cache, as_keys(range(10)))
    assert found(cache, as_keys(range(10))) == 3, "cut short"
    held = cache.hold(1)
    assert held is not None
    store(cache, as_keys(range(10)))
    assert found(cache, as_keys(range(10))) == 3, "one is held, another is spare"
    more = cache.hold(2)
    assert more is not None
    store(cache, as_keys([7] * 4))
    assert found(cache, as_keys([7] * 4)) == 2, "all spare blocks are given away, and none need stay free"
    cache.give_back(held + more)
    assert (cache.held_blocks, cache.available_blocks) == (0, 5)


@pytest.mark.parametrize("flushes", [1, 2])
def test_a_write_from_before_a_flush_is_discarded(flushes: int) -> None:
    cache = HostCache(BLOCK, num_blocks=4, num_slots=1)
    write = cache.reserve(as_keys(range(4)), b"", [4])
    assert write is not None
    for _ in range(flushes):
        cache.flush()
    cache.commit(write)
    assert found(cache, as_keys(range(4))) == 0
    assert (cache.writing_blocks, cache.tree.snapshots.writing, cache.available_blocks) == (0, 0, 4)


def test_a_prefix_ends_where_an_intact_state_was_saved() -> None:
    cache, keys = HostCache(BLOCK, num_blocks=4, num_slots=2), as_keys(range(8))
    store(cache, keys, [2, 6])
    prefix = cache.find(keys, 8, b"")
    assert prefix is not None
    assert prefix.snapshot is not None
    assert len(prefix.blocks) == 3
    assert cache.damage([], [prefix.snapshot.slot]) == 1
    assert cache.damage([], [prefix.snapshot.slot]) == 0, "known"
    cache.release(prefix)
    assert found(cache, keys) == 1, "the earlier state is intact"
    store(cache, keys, [2, 6])
    assert found(cache, keys) == 3, "saved again"


def test_only_states_that_are_missing_receive_slots() -> None:
    cache, keys = HostCache(BLOCK, num_blocks=4, num_slots=3), as_keys(range(8))
    store(cache, keys, [4])
    write = cache.reserve(keys, b"", [2, 4, 10])
    assert write is not None, "a state is missing, although no block is"
    assert (list(write.states), write.blocks) == ([2], {})
    cache.commit(write)
    assert cache.reserve(keys, b"", [2, 4]) is None
    assert cache.tree.snapshots.attached == 2
