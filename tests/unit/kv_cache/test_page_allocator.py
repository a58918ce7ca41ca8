"""The free list of KV pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache.page_allocator import PageAllocator


def test_page_0_is_never_given_out() -> None:
    allocator = PageAllocator(5)
    assert allocator.total == allocator.free_pages == 4
    assert allocator.allocate(4) == [1, 2, 3, 4]
    assert allocator.free_pages == 0


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match="page 0 and at least one more"):
        PageAllocator(num_pages)
    assert PageAllocator(2).allocate(1) == [1]


def test_too_many_takes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.free_pages == 3
    assert allocator.allocate(0) == []


def test_a_freed_page_rests_longest() -> None:
    allocator = PageAllocator(5)
    first = allocator.allocate(2)
    assert first == [1, 2]
    allocator.free([2, 1])
    assert allocator.allocate(4) == [3, 4, 2, 1]


@pytest.mark.parametrize("page", [0, -1, -4, 3, 5, 99])
def test_freeing_what_is_not_held_raises(page: int) -> None:
    """Page 0, page ids out of range on both sides, and pages that are already free."""
    allocator = PageAllocator(5)
    assert allocator.allocate(2) == [1, 2]
    with pytest.raises(ValueError, match="not held"):
        allocator.free([page])
    assert allocator.free_pages == 2
    allocator.check_integrity()


def test_freeing_twice_in_one_call_raises() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(4)
    with pytest.raises(ValueError, match="page 2 "):
        allocator.free([1, 2, 2])


def test_integrity_sees_damage() -> None:
    allocator = PageAllocator(4)
    allocator._free.append(1)
    with pytest.raises(AssertionError, match="twice"):
        allocator.check_integrity()
    allocator = PageAllocator(4)
    allocator._is_free[2] = 0
    with pytest.raises(AssertionError, match="differ"):
        allocator.check_integrity()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_pages_are_conserved(steps: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(10)
    held: list[int] = []
    for take, count in steps:
        if take:
            pages = allocator.allocate(count)
            assert (pages is None) == (count > 9 - len(held))
            held += pages or []
        else:
            allocator.free(held[:count])
            del held[:count]
        assert len(set(held)) == len(held)
        assert allocator.free_pages == 9 - len(held)
        allocator.check_integrity()
