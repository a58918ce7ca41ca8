"""Tracks who holds which page and state slot: free lists, the prefix cache, and one lease per request.

Every page but page 0 is in exactly one place: free, cached (owned by the tree), or owned by one lease. Every state slot
but slot 0 is free or owned by one lease; slots for snapshots of cached prefixes are separate (snapshots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from common.kv_cache.image_keys import paired
from common.kv_cache.page_allocator import PageAllocator
from common.kv_cache.radix_cache import Keys, NoPrefixCache, PrefixCache, RadixNode
from common.kv_cache.snapshots import StateLease


def as_keys(token_ids: Sequence[int] | Keys) -> Keys:
    """Return token ids as radix keys."""
    return np.asarray(token_ids, dtype=np.int64)


def as_bigram_keys(token_ids: Sequence[int] | Keys) -> Keys:
    """Return keys of tokens together with their successors, for pages that also contain KV of a draft.

    The draft's KV of position t also depends on token t + 1. n tokens have n - 1 keys, so cached pages are valid for
    both models.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    first, second = ids[:-1], ids[1:]
    keys = (first << 32) | second
    wide = ((first | second) >> 32) != 0  # image rows, which do not fit in half a key
    if wide.any():
        keys[wide] = paired(first[wide], second[wide])
    return keys


def as_window_keys(token_ids: Sequence[int] | Keys, lookahead: int) -> Keys:
    """Return a view [n - lookahead, lookahead + 1] if KV of position t depends on tokens up to t + lookahead."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) <= lookahead:
        return np.empty((0, lookahead + 1), dtype=np.int64)
    return sliding_window_view(ids, lookahead + 1)


def keys_with_lookahead(lookahead: int) -> Callable[[Sequence[int] | Keys], Keys]:
    """Return the keys for pages whose KV of a position depends on this many following tokens."""
    if lookahead > 1:
        return partial(as_window_keys, lookahead=lookahead)
    return as_bigram_keys if lookahead else as_keys


def contents_of(keys: Keys, lookahead: int) -> Keys:
    """Return what the keys of `keys_with_lookahead` were made of: one value per key.

    It ends before the first image if keys are pairs, since those of images cannot be taken apart.
    """
    if keys.ndim > 1:
        return keys[:, 0]
    if not lookahead:
        return keys
    mixed = keys < 0
    return keys[: int(mixed.argmax()) if mixed.any() else len(keys)] >> 32


class PageSpace:
    """Combines allocator and prefix cache: pages that are only cached are evicted when an allocation needs them.

    If the model has per-request planes, `lease` returns both pages and a state slot, or None. Where prompts are
    computed, a cached prefix is then reused only up to the last token after which the state was saved. A decode node
    reuses all of its pages, because it receives the state with each prompt.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        cache: PrefixCache,
        keys: Callable[[Sequence[int] | Keys], Keys] = as_keys,
        num_slots: int = 0,
        grid: int = 0,
        computes_prompts: bool = True,
    ) -> None:
        """Create a space in which everything is free.

        Raises ValueError for a prefix cache without snapshots together with state slots, if prompts are computed.

        Args:
            num_pages: counts page 0 too.
            keys: says what a position's KV depends on.
            num_slots: number of slots that leases can own for per-request state, including slot 0; 0 for a model
                that keeps none.
            grid: tokens, whole pages, at whose multiples the state of a prompt can be saved. Used with snapshots.
            computes_prompts: whether a prompt goes on from the end of its cached prefix, for which its state is needed.
        """
        self._continues_states = num_slots > 0 and computes_prompts
        if self._continues_states and not cache.snapshots.total and not isinstance(cache, NoPrefixCache):
            raise ValueError(
                "a cached prefix has pages but no state: turn the prefix cache off, or add snapshots"
            )
        self._grid = grid
        self._slots = PageAllocator(num_slots) if num_slots else None
        self.page_size = page_size
        self.keys = keys
        self._allocator = PageAllocator(num_pages)
        self.cache = cache

    @property
    def total_pages(self) -> int:
        return self._allocator.total

    @property
    def free_pages(self) -> int:
        return self._allocator.free_pages

    @property
    def available_pages(self) -> int:
        """Maximum number of pages that `allocate` can return."""
        return self._allocator.free_pages + self.cache.evictable_pages

    @property
    def leased_pages(self) -> int:
        """Number of pages owned by leases: neither free nor in the tree. 0 when idle."""
        return self.total_pages - self.free_pages - self.cache.cached_pages

    @property
    def total_slots(self) -> int:
        """Number of state slots that leases can own; 0 for a model without per-request planes."""
        return 0 if self._slots is None else self._slots.total

    @property
    def free_slots(self) -> int:
        return 0 if self._slots is None else self._slots.free_pages

    @property
    def leased_slots(self) -> int:
        """Number of state slots owned by leases. 0 when idle."""
        return self.total_slots - self.free_slots

    def has_room(self, pages: int) -> bool:
        """Return whether a lease of this many fresh pages would succeed now."""
        return self.available_pages >= pages and (self._slots is None or self._slots.free_pages > 0)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages, evicting from the cache as needed; None if that is not enough."""
        missing = count - self._allocator.free_pages
        if missing > 0:
            if missing > self.cache.evictable_pages:
                return None
            self._allocator.free(self.cache.evict(missing))
        return self._allocator.allocate(count)

    def free(self, pages: Sequence[int], slot: int = 0) -> None:
        """Give back pages, and a state slot if there is one."""
        self._allocator.free(pages)
        if slot:
            assert self._slots is not None
            self._slots.free((slot,))

    def flush(self) -> None:
        """Free all cached pages that no lease uses."""
        self._allocator.free(self.cache.evict(self.cache.evictable_pages))

    def lease(
        self, keys: Keys, num_pages: int, max_cached_tokens: int, salt: bytes = b""
    ) -> PageLease | None:
        """Return `num_pages` pages for a sequence: a cached prefix of at most `max_cached_tokens`, then fresh ones.

        If its state is needed, the prefix ends where the state was saved (`lease.restore`). Slots are set aside to
        save it at the last border before the sequence's end, and at the last one before the end of the cached pages,
        where other sequences branch off (`lease.saves`), as far as there are any.

        Only pages that were committed under the same `salt` are found.
        The lease also owns a state slot if the space has any. Returns None if there is not enough room.
        """
        if self._slots is not None and not self._slots.free_pages:
            return None
        limit = min(max_cached_tokens // self.page_size, num_pages)
        match = self.cache.match(keys[: limit * self.page_size], salt)
        branch = len(match.pages) * self.page_size
        if self._continues_states:
            match = match.with_state()
        self.cache.lock(match.node)  # before allocating, so that eviction cannot take the match
        fresh = self.allocate(num_pages - len(match.pages))
        if fresh is None:
            self.cache.unlock(match.node)
            return None
        slot = 0
        if self._slots is not None:
            (slot,) = self._slots.allocate(1) or (0,)
        state = StateLease(self.cache.snapshots, slot, match.node.snapshot)
        if self.cache.snapshots.total:
            last = min(max_cached_tokens, len(keys), num_pages * self.page_size)
            borders = sorted({each // self._grid * self._grid for each in (branch, last)})
            state.set_aside(each for each in borders if each > len(match.pages) * self.page_size)
        return PageLease(self, match.pages + fresh, fresh, match.node, salt, state)

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
        self.cache.check_integrity()
        assert self.leased_pages >= 0, "free + cached > total: a page is in two places"
        if self._slots is not None:
            self._slots.check_integrity()


class PageLease:
    """The pages of one request in logical order, and its state slots. `release` exactly once."""

    __slots__ = (
        "_committed",
        "_node",
        "_own",
        "_released",
        "_salt",
        "_space",
        "cached_pages",
        "pages",
        "state",
    )

    def __init__(
        self,
        space: PageSpace,
        pages: list[int],
        own: list[int],
        node: RadixNode,
        salt: bytes,
        state: StateLease,
    ) -> None:
        self._space = space
        self._salt = salt
        # Those of `pages` (or duplicates of cached ones) that return to the free list at release.
        self._own = own
        self._node = node  # locked
        self.pages = pages
        self.state = state
        self.cached_pages = len(pages) - len(own)  # prefix that the cache had at the start
        # Prefix that `_node` protects from eviction, as these pages or others.
        self._committed = self.cached_pages
        self._released = False

    @property
    def slot(self) -> int:
        """The slot of the planes that are kept per request; 0: the model has none."""
        return self.state.slot

    @property
    def cached_tokens(self) -> int:
        return self.cached_pages * self._space.page_size

    def grow(self, count: int = 1) -> list[int] | None:
        """Append fresh pages and return them, or None if there is no room."""
        fresh = self._space.allocate(count)
        if fresh is not None:
            self._own.extend(fresh)
            self.pages.extend(fresh)
        return fresh

    def commit(self, keys: Keys) -> None:
        """Offer the whole pages of `keys` (all computed) to the cache; the lease keeps using them.

        A prefix shorter than the committed one changes nothing: the pages that the lease reads stay locked. States that
        were saved in it become snapshots.
        """
        whole = min(len(keys) // self._space.page_size, len(self.pages))
        if whole > self._committed:
            self._insert(keys, whole)
        for tokens, slot in self.state.saved(whole * self._space.page_size):
            self._space.cache.save(keys[:tokens], slot, self._salt)

    def _insert(self, keys: Keys, whole: int) -> None:
        self._committed = whole
        cache = self._space.cache
        node, first_adopted = cache.insert(keys, self.pages[:whole], self._salt)
        cache.lock(node)
        cache.unlock(self._node)
        self._node = node
        adopted = set(self.pages[first_adopted:whole])
        self._own = [page for page in self._own if page not in adopted]

    def release(self) -> None:
        """Release the lease. Raises ValueError for a second release, which would take another request's lock."""
        if self._released:
            raise ValueError("a lease is released twice")
        self._released = True
        self.state.release()
        self._space.cache.unlock(self._node)
        self._space.free(self._own, self.slot)
        self._own = []
        self.pages = []
        self.state.slot = 0
