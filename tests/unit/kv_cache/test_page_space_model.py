"""Page bookkeeping against a simple model: a dict of all cached prefixes.

The tree under test splits edges, evicts parts and counts locks. The model has one entry per cached page, keyed by the
whole prefix that ends with the page, with the time of its last use. Both must agree after every step. In the model, a
salt changes the tokens of its sequence: token t of a sequence with salt s is t + 2 * s. Spaces with state slots have no
cache, and each of their leases owns a slot of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kv_cache.page_space import PageLease, PageSpace, as_keys
from common.kv_cache.radix_cache import Keys, NoPrefixCache, RadixCache, RadixNode

Prefix = tuple[int, ...]
SALTS = [b"", b"tenant-a", b"tenant-bb"]


def _sequence(salt: int, tokens: list[int]) -> list[int]:
    return [token + 2 * salt for token in tokens]


BITS = st.lists(st.integers(0, 1), max_size=14)
SALTED = st.builds(_sequence, st.integers(0, len(SALTS) - 1), BITS)


def keys_of(tokens: list[int]) -> Keys:
    """Return the keys of a sequence for the tree, without its salt."""
    return as_keys([token % 2 for token in tokens])


def salt_of(tokens: list[int]) -> bytes:
    """Return the salt of a sequence; for an empty one it makes no difference."""
    return SALTS[tokens[0] // 2] if tokens else b""


@dataclass
class Held:
    """A lease, and what the model knows about it."""

    lease: PageLease
    tokens: list[int]
    locked: Prefix  # the cached prefix that it protects


@dataclass
class Cached:
    page: int
    used: int


class PageSpaceMachine(RuleBasedStateMachine):
    """Requests arrive, grow, commit and leave; the whole tree is compared with `self.cached`."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[Prefix, Cached] = {}
        self.held: list[Held] = []
        self.clock = 0

    @initialize(
        page_size=st.integers(1, 3),
        pages=st.integers(1, 14),
        slots=st.sampled_from([0, 0, 1, 2, 5]),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, page_size: int, pages: int, slots: int, caching: bool) -> None:
        """`slots`: of states, which come from elsewhere."""
        self.size, self.total, self.caching, self.slots = page_size, pages, caching, slots
        self.cache = RadixCache(page_size)
        cache = self.cache if self.caching else NoPrefixCache()
        num_slots = self.slots + 1 if self.slots else 0
        self.space = PageSpace(page_size, pages + 1, cache, num_slots=num_slots, computes_prompts=False)

    # -- the model ---------------------------------------------------------------------------------------------

    def prefixes(self, tokens: list[int] | Prefix, count: int) -> list[Prefix]:
        return [tuple(tokens[: (index + 1) * self.size]) for index in range(count)]

    def longest(self, tokens: list[int], count: int) -> list[Prefix]:
        """Return the cached prefixes of at most `count` pages, shortest first, and mark them as used."""
        self.clock += 1
        found: list[Prefix] = []
        for prefix in self.prefixes(tokens, min(count, len(tokens) // self.size)):
            if prefix not in self.cached:
                break
            self.cached[prefix].used = self.clock
            found.append(prefix)
        return found

    def locked(self) -> set[Prefix]:
        return {p for held in self.held for p in self.prefixes(held.locked, len(held.locked) // self.size)}

    def free(self) -> int:
        return self.total - len(self.cached) - sum(len(held.lease._own) for held in self.held)

    def evictable(self, also_locked: list[Prefix]) -> int:
        return len(self.cached) - len(self.locked().union(also_locked))

    def expect_eviction(self, count: int, also_locked: list[Prefix]) -> None:
        """Expect an eviction of exactly `count` unlocked, least recently used pages, never a prefix of a kept one."""
        kept = self.tree()
        gone = {prefix: cached for prefix, cached in self.cached.items() if prefix not in kept}
        assert len(gone) == max(count, 0)
        locked = self.locked().union(also_locked)
        assert not gone.keys() & locked
        self.cached = {prefix: cached for prefix, cached in self.cached.items() if prefix in kept}
        parents = {prefix[: -self.size] for prefix in self.cached}
        leaves = [c.used for p, c in self.cached.items() if p not in parents and p not in locked]
        assert not gone or not leaves or max(cached.used for cached in gone.values()) <= min(leaves)

    def tree(self) -> dict[Prefix, int]:
        """Return the content of the tree under test: prefix -> page."""
        found: dict[Prefix, int] = {}
        stack: list[tuple[RadixNode, Prefix, int]] = [(self.cache._root, (), 0)]
        while stack:
            node, prefix, salt = stack.pop()
            for index, page in enumerate(node.pages):
                end = (index + 1) * self.size
                found[prefix + tuple(_sequence(salt, node.keys[:end].tolist()))] = page
            whole = prefix + tuple(_sequence(salt, node.keys.tolist()))
            for child in node.children.values():
                stack.append((child, whole, SALTS.index(child.salt) if node is self.cache._root else salt))
        return found

    # -- actions of requests -------------------------------------------------------------------------------------

    @rule(tokens=SALTED, extra=st.integers(0, 3), spare=st.integers(0, 4))
    def lease(self, tokens: list[int], extra: int, spare: int) -> None:
        wanted = self.space.pages_for(len(tokens)) + extra
        limit = max(len(tokens) - spare, 0)
        free = self.free()
        has_slot = not self.slots or len(self.held) < self.slots
        matched = self.longest(tokens, limit // self.size) if self.caching and has_slot else []
        needed = wanted - len(matched)
        fits = has_slot and needed <= free + self.evictable(matched)
        if not matched:
            assert self.space.has_room(needed) == fits
        lease = self.space.lease(keys_of(tokens), wanted, limit, salt_of(tokens))
        if not fits:
            assert lease is None
            return
        assert lease is not None
        self.expect_eviction(needed - free, matched)
        assert lease.pages[: len(matched)] == [self.cached[prefix].page for prefix in matched]
        assert len(lease.pages) == wanted
        assert lease.cached_tokens == len(matched) * self.size
        self.held.append(Held(lease, tokens, matched[-1] if matched else ()))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(0, 3), more=st.lists(st.integers(0, 1), max_size=4))
    def grow(self, data: st.DataObject, count: int, more: list[int]) -> None:
        held = data.draw(st.sampled_from(self.held))
        free = self.free()
        fresh = held.lease.grow(count)
        if count > free + self.evictable([]):
            assert fresh is None
            return
        assert fresh is not None
        assert held.lease.pages[len(held.lease.pages) - count :] == fresh
        self.expect_eviction(count - free, [])
        if held.tokens:  # a lease keeps its initial salt
            more = _sequence(held.tokens[0] // 2, more)
        held.tokens = (held.tokens + more)[: len(held.lease.pages) * self.size]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        length = data.draw(st.integers(0, len(held.tokens)))
        held.lease.commit(keys_of(held.tokens[:length]))
        whole = length // self.size
        if not self.caching or whole * self.size <= len(held.locked):
            return
        present = self.longest(held.tokens, whole)
        for index, prefix in enumerate(self.prefixes(held.tokens, whole)):
            if index >= len(present):
                self.cached[prefix] = Cached(held.lease.pages[index], self.clock)
        held.locked = tuple(held.tokens[: whole * self.size])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.held.remove(held)
        held.lease.release()

    @rule(tokens=SALTED)
    def look(self, tokens: list[int]) -> None:
        if self.caching:
            expected = [self.cached[prefix].page for prefix in self.longest(tokens, len(tokens))]
            assert self.cache.match(keys_of(tokens), salt_of(tokens)).pages == expected

    # -- invariants ----------------------------------------------------------------------------------------------

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        if not hasattr(self, "space"):
            return
        self.space.check_integrity()
        assert self.tree() == {prefix: cached.page for prefix, cached in self.cached.items()}
        own = [page for held in self.held for page in held.lease._own]
        free = list(self.space._allocator._free)
        everywhere = [*free, *own, *self.tree().values()]
        assert sorted(everywhere) == list(range(1, self.total + 1))
        assert self.space.free_pages == len(free)
        assert self.space.leased_pages == len(own)
        assert self.space.cache.cached_pages == len(self.cached)
        assert self.space.available_pages == len(free) + self.evictable([])

    @invariant()
    def every_state_slot_has_one_lease(self) -> None:
        if not hasattr(self, "space"):
            return
        held = [each.lease.slot for each in self.held]
        if not self.slots:
            assert not any(held)
            return
        assert sorted([*held, *self.free_slots()]) == list(range(1, self.slots + 1))
        assert self.space.leased_slots == len(held)
        assert self.space.total_slots - self.space.free_slots == len(held)

    def free_slots(self) -> list[int]:
        assert self.space._slots is not None
        return list(self.space._slots._free)

    @invariant()
    def what_a_lease_reads_is_its_own_or_locked(self) -> None:
        if not hasattr(self, "space"):
            return
        safe = {self.cached[prefix].page for prefix in self.locked()}
        for held in self.held:
            assert set(held.lease.pages) <= safe | set(held.lease._own)

    def teardown(self) -> None:
        for held in self.held:
            held.lease.release()
        if hasattr(self, "space"):
            assert self.space.leased_pages == self.space.leased_slots == 0
            assert self.space.available_pages == self.total


TestPageSpace = PageSpaceMachine.TestCase
TestPageSpace.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
