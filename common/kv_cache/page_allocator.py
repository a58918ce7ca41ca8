"""Free list of KV pages. Page 0 is reserved for padding and is never allocated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageAllocator:
    """FIFO, so that a freed page stays unused as long as possible before it is written again."""

    def __init__(self, num_pages: int) -> None:
        """`num_pages` includes page 0, as the pool's shape does."""
        if num_pages < 2:
            raise ValueError(f"a pool needs page 0 and at least one more, got {num_pages}")
        self._free = deque(range(1, num_pages))
        self._is_free = bytearray(b"\x00" + b"\x01" * (num_pages - 1))
        self.total = num_pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` page ids, or None (and take nothing) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Return pages to the free list.

        Raises ValueError for a page that is already free, which would corrupt requests.
        """
        for page in pages:
            if not 0 < page <= self.total or self._is_free[page]:
                raise ValueError(f"page {page} is freed but not held")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the list and the map agree."""
        assert len(set(self._free)) == len(self._free), "a page is in the free list twice"
        assert sum(self._is_free) == len(self._free), "free map and free list differ"
        assert all(self._is_free[page] for page in self._free)
