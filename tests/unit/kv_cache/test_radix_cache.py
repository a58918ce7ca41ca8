"""Cases of the prefix cache written by hand: matching, splitting, eviction order, partial eviction, locks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.page_space import as_keys
from common.kv_cache.radix_cache import Match, NoPrefixCache, RadixCache, RadixNode


def put(cache: RadixCache, tokens: Sequence[int], pages: Sequence[int]) -> tuple[RadixNode, int]:
    node, first_adopted = cache.insert(as_keys(tokens), pages)
    cache.check_integrity()
    return node, first_adopted


def get(cache: RadixCache, tokens: Sequence[int]) -> list[int]:
    match = cache.match(as_keys(tokens))
    cache.check_integrity()
    return match.pages


def test_an_empty_cache_matches_nothing() -> None:
    cache = RadixCache(2)
    assert get(cache, []) == []
    assert get(cache, [1, 2, 3]) == []
    assert cache.evict(5) == []
    assert cache.cached_pages == cache.evictable_pages == 0


def test_only_whole_pages_match() -> None:
    cache = RadixCache(3)
    assert put(cache, [1, 2, 3, 4, 5, 6], [7, 8])[1] == 0
    assert get(cache, [1, 2, 3, 4, 5, 6]) == [7, 8]
    assert get(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [7, 8]
    assert get(cache, [1, 2, 3, 4, 5]) == [7]
    assert get(cache, [1, 2, 3, 4, 5, 0]) == [7]
    assert get(cache, [1, 2]) == []
    assert get(cache, [1, 2, 0]) == []
    assert get(cache, [0, 2, 3]) == []
    assert cache.cached_pages == 2


def test_a_tail_that_is_no_whole_page_is_not_stored() -> None:
    cache = RadixCache(4)
    node, first = cache.insert(as_keys(range(11)), [5, 6])
    assert (first, node.pages, len(node.keys)) == (0, [5, 6], 8)
    cache.check_integrity()


def test_matching_inside_an_edge_splits_it_and_keeps_both_halves() -> None:
    cache = RadixCache(2)
    put(cache, [1, 1, 2, 2, 3, 3, 4, 4], [11, 12, 13, 14])
    assert get(cache, [1, 1, 2, 2, 9, 9]) == [11, 12]
    assert get(cache, [1, 1, 2, 2, 3, 3, 4, 4]) == [11, 12, 13, 14]
    assert get(cache, [1, 1]) == [11]
    assert get(cache, [1, 1, 2, 2, 3, 3, 4, 4]) == [11, 12, 13, 14]
    assert cache.cached_pages == 4


def test_branches_share_their_prefix() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3], [21, 22, 23])
    node, first = put(cache, [1, 2, 4, 5], [0, 0, 24, 25])
    assert first == 2
    assert node.pages == [24, 25]
    assert get(cache, [1, 2, 3]) == [21, 22, 23]
    assert get(cache, [1, 2, 4, 5]) == [21, 22, 24, 25]
    assert cache.cached_pages == 5


def test_inserting_again_adopts_nothing() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3], [21, 22, 23])
    assert put(cache, [1, 2, 3], [31, 32, 33])[1] == 3
    assert put(cache, [1, 2], [31, 32])[1] == 2
    assert put(cache, [1, 2, 3, 4], [31, 32, 33, 34])[1] == 3
    assert get(cache, [1, 2, 3, 4]) == [21, 22, 23, 34]


def test_inserting_nothing() -> None:
    cache = RadixCache(2)
    assert put(cache, [1], [])[1] == 0
    assert cache.cached_pages == 0


def test_the_caller_may_change_its_keys_afterwards() -> None:
    cache = RadixCache(1)
    keys = as_keys([1, 2, 3])
    cache.insert(keys, [21, 22, 23])
    keys[:] = 9
    assert get(cache, [1, 2, 3]) == [21, 22, 23]
    cache.check_integrity()


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    cache = RadixCache(1)
    put(cache, [1], [21])
    put(cache, [2], [22])
    put(cache, [3], [23])
    get(cache, [1])
    assert cache.evict(1) == [22]
    assert cache.evict(1) == [23]
    assert cache.evict(1) == [21]
    assert cache.evict(1) == []


def test_a_parent_goes_after_its_children_and_only_then() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2], [21, 22])
    put(cache, [1, 3], [0, 23])
    put(cache, [5], [25])
    assert cache.evict(4) == [22, 23, 21, 25]
    cache.check_integrity()


def test_using_a_prefix_does_not_refresh_its_continuations() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2], [21, 22])
    put(cache, [3], [23])
    get(cache, [1])
    assert cache.evict(3) == [22, 23, 21]


def test_a_long_edge_gives_its_tail_first() -> None:
    cache = RadixCache(2)
    put(cache, [1, 1, 2, 2, 3, 3], [21, 22, 23])
    assert cache.evict(1) == [23]
    cache.check_integrity()
    assert get(cache, [1, 1, 2, 2, 3, 3]) == [21, 22]
    assert cache.cached_pages == cache.evictable_pages == 2
    put(cache, [1, 1, 2, 2, 3, 3], [0, 0, 33])
    assert get(cache, [1, 1, 2, 2, 3, 3]) == [21, 22, 33]


def test_eviction_gives_exactly_what_was_asked_for() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3], [21, 22, 23])
    put(cache, [4, 5, 6], [24, 25, 26])
    assert cache.evict(4) == [21, 22, 23, 26]
    cache.check_integrity()
    assert get(cache, [4, 5, 6]) == [24, 25]
    assert cache.evict(0) == []
    assert cache.evict(9) == [24, 25]


def test_eviction_does_not_look_at_every_leaf() -> None:
    """Each page that a running request takes from a full pool evicts one: it happens several times in every step."""
    cache, calls = RadixCache(1), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for page in range(1000):
        cache.insert(as_keys([page, page]), [2 * page, 2 * page + 1])
    used = [cache.match(as_keys([page, page])).node for page in range(10)]
    for node in used[:5]:
        cache.lock(node)
    sys.setprofile(count)
    try:
        evicted = [cache.evict(1) for _ in range(3)]
    finally:
        sys.setprofile(None)
    assert evicted == [[21], [20], [23]]
    assert calls < 60
    cache.check_integrity()


def test_locked_pages_stay() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2, 3], [21, 22, 23])
    match = cache.match(as_keys([1, 2]))
    cache.lock(match.node)
    assert (cache.cached_pages, cache.evictable_pages) == (3, 1)
    assert cache.evict(9) == [23]
    cache.check_integrity()
    cache.unlock(match.node)
    assert cache.evict(9) == [21, 22]


def test_a_lock_survives_a_split_of_its_edge() -> None:
    cache = RadixCache(1)
    node, _ = put(cache, [1, 2, 3, 4], [21, 22, 23, 24])
    cache.lock(node)
    get(cache, [1, 2])  # splits
    get(cache, [1, 2, 3])
    assert cache.evictable_pages == 0
    assert cache.evict(9) == []
    cache.unlock(node)
    assert cache.evictable_pages == 4
    cache.check_integrity()
    assert sorted(cache.evict(9)) == [21, 22, 23, 24]


def test_locks_count() -> None:
    cache = RadixCache(1)
    put(cache, [1, 2], [21, 22])
    upper, lower = cache.match(as_keys([1])).node, cache.match(as_keys([1, 2])).node
    for node in (upper, lower, lower):
        cache.lock(node)
        cache.check_integrity()
    cache.unlock(lower)
    assert cache.evictable_pages == 0
    cache.unlock(lower)
    assert cache.evictable_pages == 1
    cache.unlock(upper)
    assert cache.evictable_pages == 2
    with pytest.raises(ValueError, match="without lock"):
        cache.unlock(upper)


def test_the_root_can_be_locked_by_requests_without_a_prefix() -> None:
    cache = RadixCache(1)
    match = cache.match(as_keys([1]))
    cache.lock(match.node)
    put(cache, [2], [22])
    assert cache.evict(1) == [22]
    cache.unlock(match.node)


def test_keys_need_all_64_bits() -> None:
    """Bigrams of two token ids share their low half."""
    cache = RadixCache(1)
    put(cache, [(1 << 32) + 7], [21])
    assert get(cache, [(2 << 32) + 7]) == []
    assert get(cache, [(1 << 32) + 7]) == [21]


def root(cache: RadixCache) -> RadixNode:
    """Return the root, which matches a sequence without keys."""
    return cache.match(as_keys([])).node


def damaged(damage: str) -> RadixCache:
    cache = RadixCache(1)
    cache.insert(as_keys([1, 2]), [21, 22])
    cache.match(as_keys([1]))
    (upper,) = root(cache).children.values()
    (lower,) = upper.children.values()
    if damage == "owned twice":
        lower.pages = [21]
    elif damage == "keys and pages differ":
        lower.keys = as_keys([2, 3])
    elif damage == "wrong key":
        lower.keys = as_keys([3])
    elif damage == "without pages":
        lower.pages = []
    elif damage == "fewer locks":
        lower.locks = 1
    elif damage == "know its parent":
        lower.parent = root(cache)
    return cache


@pytest.mark.parametrize(
    "damage",
    ["owned twice", "keys and pages differ", "wrong key", "without pages", "fewer locks", "know its parent"],
)
def test_integrity_sees_damage(damage: str) -> None:
    with pytest.raises(AssertionError, match=damage):
        damaged(damage).check_integrity()


def test_integrity_sees_fewer_locks_than_the_children_have() -> None:
    """A lock of a child is also one of its parent: two locked children under one lock lose it at the first unlock."""
    cache = RadixCache(1)
    cache.insert(as_keys([1, 2]), [21, 22])
    cache.insert(as_keys([1, 3]), [21, 23])
    for tokens in ([1, 2], [1, 3]):
        cache.lock(cache.match(as_keys(tokens)).node)
    cache.check_integrity()
    cache.match(as_keys([1])).node.locks = 1
    with pytest.raises(AssertionError, match="locks"):
        cache.check_integrity()


@pytest.mark.parametrize("counter", ["_cached", "_evictable"])
def test_integrity_sees_wrong_counts(counter: str) -> None:
    cache = RadixCache(1)
    cache.insert(as_keys([1, 2]), [21, 22])
    setattr(cache, counter, 1)
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_no_prefix_cache_never_matches_and_owns_nothing() -> None:
    cache = NoPrefixCache()
    node, first_adopted = cache.insert(as_keys([1, 2, 3]), [4, 5, 6])
    assert first_adopted == 3
    match = cache.match(as_keys([1, 2, 3]))
    assert isinstance(match, Match)
    assert match.pages == []
    for each in (node, match.node):
        cache.lock(each)
        cache.unlock(each)
    assert cache.evict(3) == []
    assert (cache.cached_pages, cache.evictable_pages) == (0, 0)
    cache.check_integrity()


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12),
    st.lists(st.integers(0, 1), max_size=9),
)
def test_match_is_the_longest_common_prefix_in_whole_pages(
    page_size: int, sequences: list[list[int]], query: list[int]
) -> None:
    cache = RadixCache(page_size)
    next_page = 1
    for tokens in sequences:
        count = len(tokens) // page_size
        cache.insert(as_keys(tokens), list(range(next_page, next_page + count)))
        next_page += count
        cache.check_integrity()
    shared = [
        int(np.cumprod([a == b for a, b in zip(tokens, query)], dtype=int).sum()) // page_size
        for tokens in sequences
    ]
    assert len(get(cache, query)) == min(max(shared, default=0), len(query) // page_size)


def test_salts_never_share_a_page() -> None:
    cache = RadixCache(2)
    keys = as_keys([1, 1, 2, 2, 3, 3])
    for salt, pages in ((b"a", [11, 12, 13]), (b"bb", [21, 22, 23]), (b"", [31, 32, 33])):
        assert cache.match(keys, salt).pages == []
        assert cache.insert(keys, pages, salt)[1] == 0
        cache.check_integrity()
    for salt, pages in ((b"a", [11, 12, 13]), (b"bb", [21, 22, 23]), (b"", [31, 32, 33])):
        # This splits the edge: the salt stays with its upper half.
        assert cache.match(keys[:2], salt).pages == pages[:1]
        assert cache.match(keys, salt).pages == pages
        cache.check_integrity()
    assert cache.match(keys, b"b").pages == []


def test_a_salt_is_not_mistaken_for_keys() -> None:
    """A prompt that looks like another's salt finds no pages."""
    cache = RadixCache(1)
    cache.insert(as_keys([7]), [21], as_keys([5]).tobytes())
    assert cache.match(as_keys([5, 7])).pages == []
    assert cache.match(as_keys([7]), as_keys([5]).tobytes()).pages == [21]


def test_salts_that_nothing_is_cached_for_take_no_memory() -> None:
    cache = RadixCache(1)
    for number in range(100):
        salt = number.to_bytes(2, "big")
        cache.insert(as_keys([1, 2]), [2 * number + 1, 2 * number + 2], salt)
        cache.match(as_keys([1]), salt)
        cache.match(as_keys([9]), b"never used" + salt)
    assert len(root(cache).children) == 100
    assert cache.evict(150)[:3] == [2, 1, 4]  # ordered by last use, across salts
    cache.check_integrity()
    assert len(root(cache).children) == 25
    assert cache.evict(99) != []
    assert not root(cache).children
