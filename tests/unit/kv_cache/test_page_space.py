"""Leases over the free list and the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.page_space import PageLease, PageSpace, as_keys, keys_with_lookahead
from common.kv_cache.radix_cache import NoPrefixCache, RadixCache


def space(pages: int = 8, page_size: int = 2) -> PageSpace:
    return PageSpace(page_size, pages + 1, RadixCache(page_size))


def take(pages: PageSpace, tokens: list[int], num_pages: int, max_cached: int | None = None) -> PageLease:
    lease = pages.lease(as_keys(tokens), num_pages, len(tokens) if max_cached is None else max_cached)
    assert lease is not None
    pages.check_integrity()
    return lease


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 1), (2, 1), (3, 2), (16, 8)])
def test_pages_are_rounded_up(tokens: int, expected: int) -> None:
    assert space().pages_for(tokens) == expected


def test_a_fresh_lease_has_pages_and_no_prefix() -> None:
    pages = space()
    lease = take(pages, [1, 2, 3], 2)
    assert lease.pages == [1, 2]
    assert (lease.cached_pages, lease.cached_tokens) == (0, 0)
    assert (pages.free_pages, pages.leased_pages, pages.available_pages) == (6, 2, 6)
    lease.release()
    assert (pages.free_pages, pages.leased_pages) == (8, 0)


def test_what_is_committed_is_matched_by_the_next() -> None:
    pages = space()
    first = take(pages, [1, 2, 3, 4, 5], 3)
    first.commit(as_keys([1, 2, 3, 4, 5]))
    first.release()
    assert (pages.free_pages, pages.cache.cached_pages, pages.leased_pages) == (6, 2, 0)
    second = take(pages, [1, 2, 3, 4, 9], 3, max_cached=4)
    assert second.pages[:2] == [1, 2]
    assert (second.cached_pages, second.cached_tokens) == (2, 4)
    assert (pages.leased_pages, pages.available_pages) == (1, 5)
    second.release()
    pages.check_integrity()


def test_a_flush_frees_what_no_lease_uses() -> None:
    pages = space()
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]):
        lease = take(pages, tokens, 2)
        lease.commit(as_keys(tokens))
        lease.release()
    reader = take(pages, [1, 2, 3, 4], 2)
    assert (reader.cached_pages, pages.cache.cached_pages) == (2, 3)
    pages.flush()
    pages.check_integrity()
    assert pages.cache.cached_pages == 2
    reader.release()
    pages.flush()
    pages.check_integrity()
    assert (pages.free_pages, pages.cache.cached_pages) == (8, 0)
    assert take(pages, [1, 2, 3, 4], 2).cached_pages == 0


@pytest.mark.parametrize(("max_cached", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (99, 2)])
def test_at_least_the_tokens_that_must_be_computed_are_left(max_cached: int, expected: int) -> None:
    pages = space()
    lease = take(pages, [1, 2, 3, 4], 2)
    lease.commit(as_keys([1, 2, 3, 4]))
    lease.release()
    assert take(pages, [1, 2, 3, 4], 2, max_cached).cached_pages == expected


def test_a_lease_never_holds_more_pages_than_asked_for() -> None:
    pages = space()
    lease = take(pages, [1, 2, 3, 4], 2)
    lease.commit(as_keys([1, 2, 3, 4]))
    lease.release()
    short = take(pages, [1, 2, 3, 4], 1)
    assert short.pages == [1]
    assert short.cached_pages == 1


def test_no_room_holds_nothing() -> None:
    pages = space()
    first = take(pages, [1, 2, 3, 4], 2)
    first.commit(as_keys([1, 2, 3, 4]))
    assert pages.lease(as_keys([1, 2, 3, 4]), 9, 4) is None
    pages.check_integrity()
    assert (pages.free_pages, pages.leased_pages) == (6, 0)
    first.release()
    assert pages.cache.evictable_pages == 2


def test_a_failed_lease_does_not_evict() -> None:
    pages = space()
    lease = take(pages, [1, 2, 3, 4], 2)
    lease.commit(as_keys([1, 2, 3, 4]))
    lease.release()
    assert pages.allocate(9) is None
    assert pages.cache.cached_pages == 2


def test_cached_pages_give_way_but_not_those_just_matched() -> None:
    pages = space(pages=4)
    for tokens in ([1, 1, 2, 2], [3, 3, 4, 4]):
        lease = take(pages, tokens, 2)
        lease.commit(as_keys(tokens))
        lease.release()
    assert (pages.free_pages, pages.cache.cached_pages) == (0, 4)
    lease = take(pages, [1, 1, 2, 2, 5, 5, 6, 6], 4)  # needs the pages of both others
    assert lease.cached_pages == 2
    assert len(set(lease.pages)) == 4
    assert (pages.cache.cached_pages, pages.leased_pages) == (2, 2)
    assert pages.lease(as_keys([9, 9]), 1, 0) is None


def test_growing() -> None:
    pages = space(pages=3)
    lease = take(pages, [1, 2], 1)
    assert lease.grow() == [2]
    assert lease.grow(2) is None
    assert lease.pages == [1, 2]
    assert lease.grow(0) == []
    assert lease.grow(1) == [3]
    lease.release()
    assert pages.free_pages == 3


def test_two_requests_with_the_same_prompt_at_once() -> None:
    """Both compute the prompt: neither finds the other's pages: one copy is cached, one stays with its owner."""
    pages = space()
    first, second = take(pages, [1, 2, 3, 4], 3), take(pages, [1, 2, 3, 4], 3)
    first.commit(as_keys([1, 2, 3, 4]))
    before = list(second.pages)
    second.commit(as_keys([1, 2, 3, 4]))
    assert second.pages == before  # it continues with its own copy
    pages.check_integrity()
    assert (pages.cache.cached_pages, pages.leased_pages) == (2, 4)
    first.release()
    assert pages.cache.evictable_pages == 0  # the second lease still protects the shared prefix
    second.release()
    pages.check_integrity()
    assert (pages.cache.cached_pages, pages.leased_pages, pages.free_pages) == (2, 0, 6)


def test_committing_as_the_sequence_grows() -> None:
    pages = space()
    lease = take(pages, [1, 2], 1)
    for length in range(1, 9):
        if pages.pages_for(length) > len(lease.pages):
            assert lease.grow() is not None
        lease.commit(as_keys(range(length)))
        pages.check_integrity()
        assert pages.cache.cached_pages == length // 2
        assert pages.cache.evictable_pages == 0
    lease.release()
    assert take(pages, list(range(8)), 4).cached_pages == 4


def test_keys_past_the_pages_of_the_lease_wait_for_their_page() -> None:
    pages, keys = space(), as_keys(range(6))
    lease = take(pages, list(range(4)), 2)
    lease.commit(keys)
    assert pages.cache.cached_pages == 2
    assert lease.grow() is not None
    lease.commit(keys)
    assert pages.cache.cached_pages == 3
    lease.release()
    pages.check_integrity()


def test_committing_less_than_before_keeps_the_protection() -> None:
    """The lease still reads all its pages: those that the tree owns must stay locked."""
    pages = space(pages=4)
    lease = take(pages, [1, 1, 2, 2, 3, 3], 3)
    lease.commit(as_keys([1, 1, 2, 2, 3, 3]))
    lease.commit(as_keys([1, 1]))
    lease.commit(as_keys([]))
    assert pages.cache.evictable_pages == 0
    assert pages.allocate(2) is None
    lease.release()
    assert pages.available_pages == 4


def test_committing_less_than_was_cached_keeps_the_protection() -> None:
    pages = space(pages=4)
    lease = take(pages, [1, 1, 2, 2], 2)
    lease.commit(as_keys([1, 1, 2, 2]))
    lease.release()
    lease = take(pages, [1, 1, 2, 2], 2)
    lease.commit(as_keys([1, 1]))
    assert pages.cache.evictable_pages == 0
    lease.release()


def test_releasing_twice_raises() -> None:
    """Otherwise it would remove the lock of another request with the same prefix."""
    pages = space()
    first, second = take(pages, [1, 2], 1), take(pages, [1, 2], 1)
    first.commit(as_keys([1, 2]))
    second.commit(as_keys([1, 2]))
    first.release()
    assert (first.pages, first.slot) == ([], 0)
    with pytest.raises(ValueError, match="twice"):
        first.release()
    assert pages.cache.evictable_pages == 0
    second.release()


def test_without_a_prefix_cache_nothing_matches() -> None:
    pages = PageSpace(2, 5, NoPrefixCache())
    lease = pages.lease(as_keys([1, 2, 3, 4]), 3, 4)
    assert lease is not None
    lease.commit(as_keys([1, 2, 3, 4]))
    assert (lease.cached_pages, pages.leased_pages, pages.available_pages) == (0, 3, 1)
    lease.release()
    pages.check_integrity()
    assert pages.free_pages == 4


def test_keys_are_what_the_tree_compares() -> None:
    assert as_keys([1, 2]).dtype == as_keys([]).dtype == as_keys(range(2)).dtype == "int64"


@given(
    st.integers(0, 5),
    st.integers(1, 4),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
)
def test_a_hit_knows_the_tokens_that_its_kv_depends_on(
    lookahead: int, page_size: int, first: list[int], second: list[int], wanted: list[int]
) -> None:
    """KV at position t depends on tokens up to t + lookahead, so these must match after a hit, too."""
    pages = PageSpace(page_size, 65, RadixCache(page_size), keys_with_lookahead(lookahead))
    owner: dict[int, tuple[list[int], int]] = {}
    for text in (first, second):
        lease = pages.lease(pages.keys(text), pages.pages_for(len(text)), max_cached_tokens=len(text))
        assert lease is not None
        for index, page in enumerate(lease.pages[lease.cached_pages :], lease.cached_pages):
            owner[page] = (text, index)
        lease.commit(pages.keys(text))
        lease.release()
    lease = pages.lease(pages.keys(wanted), pages.pages_for(len(wanted)), max_cached_tokens=len(wanted))
    assert lease is not None
    assert lease.cached_tokens == 0 or lease.cached_tokens + lookahead <= len(wanted)
    for index, page in enumerate(lease.pages[: lease.cached_pages]):
        text, at = owner[page]
        assert at == index
        known = (index + 1) * page_size + lookahead
        assert text[:known] == wanted[:known], "the page belongs to another text"
    lease.release()
    pages.check_integrity()


def test_keys_with_lookahead_are_a_view() -> None:
    """Keys of a million tokens cost nothing, because they are not copied."""
    ids = np.arange(1_000_000)
    keys = keys_with_lookahead(3)(ids)
    assert keys.shape == (999_997, 4)
    assert np.shares_memory(keys, ids)


def test_a_lease_is_pages_and_a_state_slot_or_nothing() -> None:
    pages = PageSpace(2, 9, NoPrefixCache(), num_slots=3)
    one, two = (pages.lease(as_keys([1, 2]), 2, 2) for _ in range(2))
    assert one is not None
    assert two is not None
    assert {one.slot, two.slot} == {1, 2}
    assert pages.lease(as_keys([1]), 1, 1) is None, "no slot is left"
    assert (pages.free_pages, pages.free_slots, pages.has_room(1)) == (4, 0, False)
    one.release()
    assert pages.lease(as_keys([1]), 7, 1) is None, "no pages are left"
    assert (pages.free_pages, pages.free_slots, pages.has_room(6), pages.has_room(7)) == (6, 1, True, False)
    two.release()
    assert (pages.leased_pages, pages.leased_slots) == (0, 0)


def test_a_model_without_per_request_planes_has_no_slots() -> None:
    pages = PageSpace(2, 5, RadixCache(2))
    lease = pages.lease(as_keys([1, 2]), 2, 2)
    assert lease is not None
    assert (lease.slot, pages.total_slots, pages.leased_slots) == (0, 0, 0)


def test_pages_are_reused_without_states_where_no_prompts_are_computed() -> None:
    pages = PageSpace(2, 9, RadixCache(2), num_slots=3, computes_prompts=False)
    first = pages.lease(as_keys(range(6)), 3, 6)
    assert first is not None
    first.commit(as_keys(range(6)))
    second = pages.lease(as_keys([*range(4), 9, 9]), 3, 6)
    assert second is not None
    assert (second.cached_tokens, second.pages[:2]) == (4, first.pages[:2])
    assert (first.slot, second.slot, second.state.restore, second.state.saves) == (1, 2, 0, [])
    for lease in (first, second):
        lease.release()
    assert (pages.leased_pages, pages.leased_slots, pages.cache.cached_pages) == (0, 0, 3)
    pages.check_integrity()


def test_a_prefix_cache_beside_state_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="no state"):
        PageSpace(2, 5, RadixCache(2), num_slots=3)
