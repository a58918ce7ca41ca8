"""Decides which cached prefixes are copied to host memory, and which are copied back for a prompt.

A prompt's pages are stored once it is computed: the copy to the host runs while the device computes, and eviction then
costs nothing. Pages that are stored only when they are reused would be evicted before, if more conversations take turns
than the device has room for; pages that are stored when they are evicted would delay the prompt that needs their room.

store   computed -> [copies to the host] -> known
load    admitted -> part of the plan of the prompt's first chunk -> compared when its results are read

Nothing waits for the steps in brackets: `settle` checks them in every turn of the main loop. Pages that are being
copied keep their request, and so its lease, alive.

Checksums are computed while the forward runs, which already reads what was loaded. If a byte has changed, nothing of
the forward is used: its request ends before its first token, with an error after which the router places it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.kv_cache.host_cache import HostCache, HostPrefix, HostWrite, pages_of
from common.kv_cache.host_plan import INTACT, Damage, HostCopy, HostMemory, Store
from common.kv_cache.host_totals import HostTotals
from common.kv_cache.page_space import PageSpace
from common.kv_cache.radix_cache import Keys
from common.kv_cache.snapshots import Snapshot
from prefill_node.request import PrefillRequest


class HostTier(Protocol):
    """Host memory for the prefix cache of a node. Not thread-safe: the node's main loop owns it."""

    @property
    def busy(self) -> bool:
        """Return whether work is in progress whose end no message announces."""
        ...

    def plan_load(self, request: PrefillRequest, keys: Keys) -> None:
        """Look up an admitted prompt, and set what its first chunk loads."""
        ...

    def store(self, request: PrefillRequest, keys: Keys) -> None:
        """Store the prefix of a computed prompt. While its `storing` is set, its lease must not be released."""
        ...

    def settle(self) -> Sequence[PrefillRequest]:
        """Process copies that have ended; return the requests whose `storing` was cleared."""
        ...

    def planned(self) -> Sequence[Store]:
        """Return the stores for the next plan, each once."""
        ...

    def loaded(self, request: PrefillRequest, damage: Damage = INTACT) -> bool:
        """Note that the plan with a prompt's load is complete, or that there will be none.

        Return whether the prompt got what was stored. `damage`: of all loads of the plan.
        """
        ...

    def flush(self) -> None: ...

    def totals(self) -> HostTotals: ...


class NoHostTier:
    """A node without host memory, which finds and keeps nothing."""

    busy = False

    def plan_load(self, request: PrefillRequest, keys: Keys) -> None:
        pass

    def store(self, request: PrefillRequest, keys: Keys) -> None:
        pass

    def settle(self) -> Sequence[PrefillRequest]:
        return ()

    def planned(self) -> Sequence[Store]:
        return ()

    def loaded(self, request: PrefillRequest, damage: Damage = INTACT) -> bool:
        return True

    def flush(self) -> None:
        pass

    def totals(self) -> HostTotals:
        return HostTotals()


@dataclass(slots=True)
class _Storing:
    """A store that is planned."""

    request: PrefillRequest
    write: HostWrite
    states: Sequence[Snapshot]  # pinned on the device


class HostPrefixes:
    """The `HostTier` of a node with host memory."""

    def __init__(
        self, cache: HostCache, memory: HostMemory, space: PageSpace, item_bytes: tuple[int, int]
    ) -> None:
        """`item_bytes`: bytes of a page, and of the state of a request."""
        self.cache = cache
        self._memory = memory
        self._space = space
        self._page_bytes, self._state_bytes = item_bytes
        self._block_pages = cache.block_tokens // space.page_size
        self._reading: dict[int, HostPrefix] = {}  # room -> what its load reads
        self._orders: list[Store] = []
        self._storing: dict[int, _Storing] = {}  # by key
        self._last_key = 0
        self._totals = HostTotals(block_tokens=cache.block_tokens, total_blocks=cache.total_blocks)

    @property
    def busy(self) -> bool:
        return bool(self._storing)

    def plan_load(self, request: PrefillRequest, keys: Keys) -> None:
        lease = request.lease
        assert lease is not None
        cached, size = lease.cached_tokens, self.cache.block_tokens
        self._totals.queries += request.num_tokens - cached
        prefix = self.cache.find(keys, request.max_cached, request.salt)
        if prefix is None:
            return
        tokens = len(prefix.blocks) * size
        if tokens - cached < size:  # too little to wait for
            self.cache.release(prefix)
            return
        host = pages_of(prefix.blocks, self._block_pages)
        first, last = lease.cached_pages, len(host)
        states = () if prefix.snapshot is None else ((lease.slot, prefix.snapshot.slot),)
        copy = HostCopy(pages=tuple(lease.pages[first:last]), host_pages=tuple(host[first:]), states=states)
        request.load, request.loaded, request.scheduled = copy, tokens, tokens
        lease.state.skip(tokens)
        self._reading[request.room] = prefix
        self._totals.loads += 1
        self._totals.hits += tokens - cached
        self._totals.loaded_bytes += self._nbytes(copy)

    def store(self, request: PrefillRequest, keys: Keys) -> None:
        assert request.lease is not None
        whole = min(len(keys) // self._space.page_size, len(request.lease.pages)) // self._block_pages
        keys = keys[: whole * self.cache.block_tokens]
        states = self._space.cache.states(keys, request.salt)
        write = self.cache.reserve(keys, request.salt, sorted(states))
        if write is None:
            return
        blocks = write.blocks
        pages = [request.lease.pages[each] for each in pages_of(blocks, self._block_pages)]
        host_pages = pages_of(blocks.values(), self._block_pages)
        saved = [states[tokens] for tokens in write.states]
        for each in saved:
            self._space.cache.snapshots.pin(each)
        copied = tuple((states[tokens].slot, slot) for tokens, slot in write.states.items())
        self._last_key += 1
        copy = HostCopy(pages=tuple(pages), host_pages=tuple(host_pages), states=copied)
        self._orders.append(Store(key=self._last_key, copy=copy))
        self._storing[self._last_key] = _Storing(request, write, saved)
        request.storing = True
        self._totals.stores += 1
        self._totals.stored_bytes += self._nbytes(copy)

    def settle(self) -> Sequence[PrefillRequest]:
        if not self._storing:
            return ()
        freed: list[PrefillRequest] = []
        unfinished = {*self._memory.unfinished(), *(each.key for each in self._orders)}
        for key in self._storing.keys() - unfinished:
            each = self._storing.pop(key)
            for state in each.states:
                self._space.cache.snapshots.unpin(state)
            each.request.storing = False
            self.cache.commit(each.write)
            freed.append(each.request)
        return freed

    def planned(self) -> Sequence[Store]:
        orders, self._orders = self._orders, []
        return orders

    def loaded(self, request: PrefillRequest, damage: Damage = INTACT) -> bool:
        prefix = self._reading.pop(request.room, None)
        if prefix is None:
            return True
        blocks = {page // self._block_pages for page in damage.pages}.intersection(prefix.blocks)
        slot = None if prefix.snapshot is None else prefix.snapshot.slot
        self._totals.checksum_failures += self.cache.damage(blocks, damage.slots)
        self.cache.release(prefix)
        return not blocks and slot not in damage.slots

    def flush(self) -> None:
        self.cache.flush()

    def totals(self) -> HostTotals:
        self._totals.cached_blocks = self.cache.cached_blocks
        self._totals.evicted_blocks = self.cache.evicted_blocks
        return self._totals

    def _nbytes(self, copy: HostCopy) -> int:
        return len(copy.pages) * self._page_bytes + len(copy.states) * self._state_bytes
