"""Decides which cached prefixes of a decode node are copied to host memory, and which are copied back for a request.

A request's pages are stored once it has ended: prompt and answer, so that the next turn of its conversation finds both.
A request that is admitted later gets from host memory what the pool has lost; its prefill node sends only the rest.
A request that is retracted is kept here, too, in blocks that nothing replaces before it has resumed.

store   ended     -> in a plan -> [copies to the host] -> known; the pages are free
        retracted -> in a plan -> [copies to the host] -> the pages are free
fetch   admitted, or resumed -> in a plan -> [copies, compared] -> the request may take part in a step

Nothing waits for the steps in brackets: `settle` checks them in every turn of the main loop. Pages that are being
copied are not free, even if their request has ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.kv_cache.host_cache import HostCache, HostPrefix, HostWrite, pages_of
from common.kv_cache.host_plan import Damage, HostCopy, HostFetch, Store
from common.kv_cache.host_totals import HostTotals
from common.kv_cache.page_space import PageLease, PageSpace
from decode_node.batch_rows import BatchRows
from decode_node.held_pages import HeldPages
from decode_node.host_fetches import HostEnds
from decode_node.request import DecodeRequest

MAX_FETCHES = 32  # in progress


class FoundPrefix(NamedTuple):
    """A prefix in host memory that is longer than the one in the pool; call `fetch` or `release` exactly once."""

    prefix: HostPrefix | None = None
    pages: int = 0  # logical pages


NOTHING_FOUND = FoundPrefix()


class EndedFetch(NamedTuple):
    """A request whose pages have come from host memory."""

    request: DecodeRequest
    intact: bool  # False: they are not what was stored


class DecodeTier(Protocol):
    """Host memory for the prefix cache of a node. Not thread-safe: the node's main loop owns it."""

    @property
    def busy(self) -> bool:
        """Return whether work is in progress whose end no message announces."""
        ...

    @property
    def frees_pages(self) -> bool:
        """Return whether pages of requests that have ended become free once they are stored."""
        ...

    @property
    def keeps_retracted(self) -> bool:
        """Return whether retracted requests are kept here."""
        ...

    @property
    def can_fetch(self) -> bool:
        """Return whether one more fetch may begin."""
        ...

    def store_retracted(
        self, request: DecodeRequest, pages: Sequence[int], max_bytes: int
    ) -> HeldPages | None:
        """Store the pages of a retracted request; its lease must not be released while it is `storing`.

        Return None if that takes more than `max_bytes`, or there is no room.
        """
        ...

    def fetch_retracted(self, request: DecodeRequest, held: HeldPages) -> None:
        """Fetch what the pool has lost of held pages to the request's lease, as `fetch` does."""
        ...

    def free_retracted(self, held: HeldPages) -> None:
        """Free held pages, once nothing copies them."""
        ...

    def find(self, request: DecodeRequest, lease: PageLease) -> FoundPrefix:
        """Look up what the pool lacks of a prompt."""
        ...

    def fetch(self, request: DecodeRequest, found: FoundPrefix) -> None:
        """Fetch what was found to the pages of the request's lease. Until `fetching` is cleared, nothing reads them."""
        ...

    def release(self, found: FoundPrefix) -> None: ...

    def store(self, request: DecodeRequest) -> None:
        """Store what an ended request has computed. It may take over the request's lease."""
        ...

    def defer_release(self, request: DecodeRequest) -> None:
        """Take over the lease of a request that ends, if something still copies to it."""
        ...

    def settle(self) -> Sequence[EndedFetch]:
        """Process copies that have ended; return the requests whose `fetching` was cleared."""
        ...

    def flush(self) -> None: ...

    def totals(self) -> HostTotals: ...


class NoDecodeTier:
    """A node without host memory, which finds and keeps nothing."""

    busy = frees_pages = keeps_retracted = can_fetch = False

    def store_retracted(
        self, request: DecodeRequest, pages: Sequence[int], max_bytes: int
    ) -> HeldPages | None:
        return None

    def fetch_retracted(self, request: DecodeRequest, held: HeldPages) -> None:
        pass

    def free_retracted(self, held: HeldPages) -> None:
        pass

    def find(self, request: DecodeRequest, lease: PageLease) -> FoundPrefix:
        return NOTHING_FOUND

    def fetch(self, request: DecodeRequest, found: FoundPrefix) -> None:
        pass

    def release(self, found: FoundPrefix) -> None:
        pass

    def store(self, request: DecodeRequest) -> None:
        pass

    def defer_release(self, request: DecodeRequest) -> None:
        pass

    def settle(self) -> Sequence[EndedFetch]:
        return ()

    def flush(self) -> None:
        pass

    def totals(self) -> HostTotals:
        return HostTotals()


NO_TIER = NoDecodeTier()


class _KeptPages(NamedTuple):
    """A store that is planned, and the lease that keeps its pages."""

    write: HostWrite
    lease: PageLease


@dataclass(slots=True)
class _Fetching:
    """A fetch that is planned. `left` is the lease of a request that has ended meanwhile."""

    request: DecodeRequest
    prefix: HostPrefix | None = None
    held: HeldPages | None = None
    left: PageLease | None = None


class DecodePrefixes:
    """The `DecodeTier` of a node with host memory."""

    def __init__(
        self, cache: HostCache, memory: HostEnds, space: PageSpace, rows: BatchRows, page_bytes: int
    ) -> None:
        """Keep prefixes of `space`. Copies are added to the moves of `rows`."""
        self.cache = cache
        self._memory = memory
        self._space = space
        self._rows = rows
        self._page_bytes = page_bytes
        self._block_pages = cache.block_tokens // space.page_size
        self._last_key = 0
        self._storing: dict[int, _KeptPages | HeldPages] = {}  # by key
        self._fetching: dict[int, _Fetching] = {}  # by key
        self._totals = HostTotals(block_tokens=cache.block_tokens, total_blocks=cache.total_blocks)

    @property
    def busy(self) -> bool:
        return bool(self._storing or self._fetching)

    @property
    def frees_pages(self) -> bool:
        return any(isinstance(each, _KeptPages) for each in self._storing.values())

    @property
    def keeps_retracted(self) -> bool:
        return True

    @property
    def can_fetch(self) -> bool:
        return len(self._fetching) < MAX_FETCHES

    def find(self, request: DecodeRequest, lease: PageLease) -> FoundPrefix:
        if not self.can_fetch:
            return NOTHING_FOUND
        keys = self._space.keys(request.contents)
        prefix = self.cache.find(keys, len(keys), request.salt)
        if prefix is None:
            return NOTHING_FOUND
        found = FoundPrefix(prefix, len(prefix.blocks) * self._block_pages)
        if found.pages - lease.cached_pages < self._block_pages:  # too little to wait for
            self.release(found)
            return NOTHING_FOUND
        return found

    def fetch(self, request: DecodeRequest, found: FoundPrefix) -> None:
        lease, prefix = request.lease, found.prefix
        assert lease is not None
        self._totals.queries += len(request.prompt) - lease.cached_tokens
        if prefix is None:
            return
        self._start_fetch(_Fetching(request, prefix), lease, prefix.blocks, found.pages)
        self._totals.loads += 1
        self._totals.hits += (found.pages - lease.cached_pages) * self._space.page_size

    def release(self, found: FoundPrefix) -> None:
        if found.prefix is not None:
            self.cache.release(found.prefix)

    def store(self, request: DecodeRequest) -> None:
        lease = request.lease
        assert lease is not None
        keys = self._space.keys(request.computed())
        whole = min(len(keys) // self._space.page_size, len(lease.pages)) // self._block_pages
        write = self.cache.reserve(keys[: whole * self.cache.block_tokens], request.salt)
        if write is None:
            return
        blocks = write.blocks
        pages = [lease.pages[each] for each in pages_of(blocks, self._block_pages)]
        self._start_store(_KeptPages(write, lease), pages, list(blocks.values()))
        request.lease = None
        self._totals.stores += 1

    def store_retracted(
        self, request: DecodeRequest, pages: Sequence[int], max_bytes: int
    ) -> HeldPages | None:
        keys = self._space.keys(request.computed())
        prefix = self.cache.find(keys, len(keys), request.salt)
        own = pages[0 if prefix is None else len(prefix.blocks) * self._block_pages :]
        count = -(-len(own) // self._block_pages)
        nbytes = count * self._block_pages * self._page_bytes
        blocks = self.cache.hold(count) if nbytes <= max_bytes else None
        if blocks is None:
            self.release(FoundPrefix(prefix))
            return None
        held = HeldPages(len(pages), nbytes, prefix, blocks)
        self._start_store(held, own, blocks)
        return held

    def fetch_retracted(self, request: DecodeRequest, held: HeldPages) -> None:
        lease = request.lease
        assert lease is not None
        if lease.cached_pages < held.num_pages:
            held.fetching = True
            known = [] if held.prefix is None else held.prefix.blocks
            self._start_fetch(_Fetching(request, held=held), lease, [*known, *held.blocks], held.num_pages)

    def free_retracted(self, held: HeldPages) -> None:
        held.dropped = True
        self._free(held)

    def defer_release(self, request: DecodeRequest) -> None:
        if request.fetching:
            self._fetching[request.fetching].left = request.lease
            request.lease, request.fetching = None, 0

    def settle(self) -> Sequence[EndedFetch]:
        if not self.busy:
            return ()
        unfinished = {*self._memory.unfinished(), *self._rows.waiting_stores}
        for key in self._storing.keys() - unfinished:
            each = self._storing.pop(key)
            if isinstance(each, HeldPages):
                each.storing = False
                self._free(each)
            else:
                self.cache.commit(each.write)
                each.lease.release()
        return [self._ended(key, damage) for key, damage in self._memory.fetched().items()]

    def flush(self) -> None:
        self.cache.flush()

    def totals(self) -> HostTotals:
        self._totals.cached_blocks = self.cache.cached_blocks
        self._totals.evicted_blocks = self.cache.evicted_blocks
        return self._totals

    def _ended(self, key: int, damage: Damage) -> EndedFetch:
        each = self._fetching.pop(key)
        blocks = {page // self._block_pages for page in damage.pages}
        prefix = each.prefix if each.held is None else each.held.prefix
        known = blocks.intersection(() if prefix is None else prefix.blocks)
        self._totals.checksum_failures += self.cache.damage(known, ()) + len(blocks - known)
        if each.held is None:
            self.release(FoundPrefix(prefix))
        else:
            each.held.fetching = False
            self._free(each.held)
        if each.left is None:
            each.request.fetching = 0
        else:
            each.left.release()
        return EndedFetch(each.request, not blocks)

    def _start_store(
        self, storing: _KeptPages | HeldPages, pages: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """Store pages in blocks, of which the last one may have room for more."""
        host = pages_of(blocks, self._block_pages)
        self._last_key += 1
        copy = HostCopy(pages=tuple(pages), host_pages=tuple(host[: len(pages)]))
        self._rows.store(Store(key=self._last_key, copy=copy))
        self._storing[self._last_key] = storing
        self._totals.stored_bytes += len(pages) * self._page_bytes

    def _start_fetch(
        self, fetching: _Fetching, lease: PageLease, blocks: Sequence[int], num_pages: int
    ) -> None:
        """Fetch the first pages of a lease from blocks, except those that the pool has."""
        host = pages_of(blocks, self._block_pages)
        first = lease.cached_pages
        copy = HostCopy(pages=tuple(lease.pages[first:num_pages]), host_pages=tuple(host[first:num_pages]))
        self._last_key += 1
        self._rows.fetch(HostFetch(key=self._last_key, copy=copy))
        self._fetching[self._last_key] = fetching
        fetching.request.fetching = self._last_key
        self._totals.loaded_bytes += len(copy.pages) * self._page_bytes

    def _free(self, held: HeldPages) -> None:
        if held.dropped and not held.storing and not held.fetching:
            self.cache.give_back(held.blocks)
            self.release(FoundPrefix(held.prefix))
