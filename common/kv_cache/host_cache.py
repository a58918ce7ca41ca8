"""Tracks which prefixes a node also keeps in host memory: a second radix tree, over blocks of host memory.

A block holds the KV of `block_tokens` tokens, some whole pages. The tree owns blocks as that of the device owns pages:
same keys, same salts, least recently used blocks are replaced first, and what is being read or extended is locked. For
models that keep a state per request, a node of the tree may have a snapshot of the state in a slot of host memory.

A block or snapshot whose bytes are not those that were written is never read again: it counts as missing until the same
prefix, computed again, is written over it.

Blocks enter the tree only in `HostCache.commit` and leave it only in `HostCache._evict`. The tree tells its observer of
both, but not of damage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.kv_cache.page_allocator import PageAllocator
from common.kv_cache.radix_cache import NO_OBSERVER, CacheObserver, Keys, Match, RadixCache, RadixNode
from common.kv_cache.snapshots import Snapshot, Snapshots


@dataclass(slots=True, eq=False)
class HostPrefix:
    """A prefix in host memory; its blocks stay as they are until `HostCache.release`."""

    blocks: list[int]
    node: RadixNode  # locked
    snapshot: Snapshot | None  # of the state at its end, pinned; None: the model keeps none


@dataclass(slots=True, eq=False)
class HostWrite:
    """Blocks and slots that are about to be written; `HostCache.commit` or `discard` exactly once."""

    keys: Keys  # of all blocks of the prefix, also of those that are there already
    salt: bytes
    first: int  # the first block of the prefix that is missing
    fresh: list[int]  # block ids of the missing ones
    again: dict[int, int]  # index of a damaged block in the prefix -> its id; it is written over
    node: RadixNode  # locked: what the tree has of the prefix
    epoch: int  # flushes before it
    states: dict[int, int] = field(default_factory=dict)  # tokens -> slot for the state after them

    @property
    def blocks(self) -> dict[int, int]:
        """Index in the prefix, ascending -> id, of all blocks that are written."""
        written = self.again | {self.first + index: block for index, block in enumerate(self.fresh)}
        return dict(sorted(written.items()))


class HostCache:
    """The bookkeeping of host memory. It copies and compares nothing (common/node/host_store.py)."""

    def __init__(
        self,
        block_tokens: int,
        num_blocks: int,
        num_slots: int = 0,
        observer: CacheObserver = NO_OBSERVER,
        spare_blocks: int = 0,
    ) -> None:
        """Begin empty.

        Args:
            num_blocks: without block 0, which is never used.
            num_slots: of snapshots, without slot 0; 0 for a model that keeps no state per request.
            observer: is told which blocks are known.
            spare_blocks: how many of them writes in progress leave to `hold`, besides those that it has given away.
        """
        self.block_tokens = block_tokens
        self.total_blocks = num_blocks
        self.evicted_blocks = 0  # replaced by others since the start
        self.tree = RadixCache(block_tokens, Snapshots(range(1, num_slots + 1)), observer)
        self._allocator = PageAllocator(num_blocks + 1)
        self._keeps_state = num_slots > 0
        self._spare_blocks = spare_blocks
        self._held: set[int] = set()  # blocks that `hold` gave away
        self._damaged: set[int] = set()  # blocks whose bytes are not those that were written
        self._damaged_slots: set[int] = set()
        self._repaired: set[int] = set()  # those of them that a write is about to replace
        self._epoch = 0

    @property
    def cached_blocks(self) -> int:
        """Number of blocks in the tree."""
        return self.tree.cached_pages

    @property
    def writing_blocks(self) -> int:
        """Number of blocks that writes own. 0 when idle."""
        return self.total_blocks - self._allocator.free_pages - self.tree.cached_pages - len(self._held)

    @property
    def held_blocks(self) -> int:
        """Number of blocks that `hold` gave away. 0 when idle."""
        return len(self._held)

    @property
    def available_blocks(self) -> int:
        """Number of blocks that `hold` can give away now: free ones, and those of prefixes that nobody uses."""
        return self._allocator.free_pages + self.tree.evictable_pages

    def find(self, keys: Keys, tokens: int, salt: bytes) -> HostPrefix | None:
        """Return the longest prefix of at most `tokens` tokens, locked; None if there is none.

        It ends before the first damaged block, and for models that keep a state where the state was saved.
        """
        whole = min(len(keys), tokens) // self.block_tokens * self.block_tokens
        match = self.tree.match(keys[:whole], salt)
        damaged = next((at for at, block in enumerate(match.pages) if block in self._damaged), None)
        if damaged is not None:
            match = self.tree.match(keys[: damaged * self.block_tokens], salt)
        if self._keeps_state:
            match = self._with_state(match)
        if not match.pages:
            return None
        snapshot = match.node.snapshot
        self.tree.lock(match.node)
        if snapshot is not None:
            self.tree.snapshots.pin(snapshot)
        return HostPrefix(match.pages, match.node, snapshot)

    def release(self, prefix: HostPrefix) -> None:
        """Unlock what `find` returned."""
        if prefix.snapshot is not None:
            self.tree.snapshots.unpin(prefix.snapshot)
        self.tree.unlock(prefix.node)

    def reserve(self, keys: Keys, salt: bytes, states: Sequence[int] = ()) -> HostWrite | None:
        """Return blocks for what is missing of this prefix, whose length is a multiple of `block_tokens`.

        Blocks used least recently are replaced. If there are too few, the prefix is cut short. Returns None if nothing
        is missing, or nothing can be written.

        Args:
            states: numbers of tokens, multiples of `block_tokens`, after which the state is known.
        """
        match = self.tree.match(keys, salt)
        self.tree.lock(match.node)
        present = len(match.pages)
        wanted = len(keys) // self.block_tokens - present
        spare = max(self._spare_blocks - len(self._held), 0)
        fresh = self._allocate(max(min(wanted, self.available_blocks - spare), 0))
        wrong = self._damaged - self._repaired
        again = {at: block for at, block in enumerate(match.pages) if block in wrong}
        keys = keys[: (present + len(fresh)) * self.block_tokens].copy()
        slots = self._slots(keys, salt, states)
        if not (fresh or again or slots):
            self.tree.unlock(match.node)
            return None
        self._repaired.update(again.values())
        return HostWrite(keys, salt, present, fresh, again, match.node, self._epoch, slots)

    def commit(self, write: HostWrite) -> None:
        """Make what was written known to `find`."""
        if write.epoch != self._epoch:
            self.discard(write)
            return
        known = self.tree.match(write.keys[: write.first * self.block_tokens], write.salt).pages
        assert len(known) == write.first, "a locked prefix was evicted"
        _, adopted = self.tree.insert(write.keys, known + write.fresh, write.salt)
        # Another write of the same prefix may have been faster.
        twice = write.fresh[: max(adopted - write.first, 0)]
        self._allocator.free(twice)
        self._damaged.difference_update(write.again.values())
        self._repaired.difference_update(write.again.values())
        for tokens, slot in write.states.items():
            self._damaged_slots.discard(slot)
            self.tree.save(write.keys[:tokens], slot, write.salt)
        self.tree.unlock(write.node)

    def discard(self, write: HostWrite) -> None:
        """Give up blocks and slots of a write."""
        self._allocator.free(write.fresh)
        self._repaired.difference_update(write.again.values())
        self.tree.snapshots.free(write.states.values())
        self.tree.unlock(write.node)

    def damage(self, blocks: Iterable[int], slots: Iterable[int]) -> int:
        """Let blocks and slots of prefixes that are being read not be found again. Return how many were not damaged."""
        new_blocks, new_slots = set(blocks) - self._damaged, set(slots) - self._damaged_slots
        self._damaged |= new_blocks
        self._damaged_slots |= new_slots
        return len(new_blocks) + len(new_slots)

    def hold(self, count: int) -> list[int] | None:
        """Return blocks outside of the tree, which nothing replaces before `give_back`; None if there are too few."""
        if count > self.available_blocks:
            return None
        blocks = self._allocate(count)
        self._held.update(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free what `hold` returned."""
        self._held.difference_update(blocks)
        self._allocator.free(blocks)

    def flush(self) -> None:
        """Forget all prefixes that nobody reads, and all writes in progress once they end."""
        self._epoch += 1
        self._evict(self.tree.evictable_pages)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is in two places, or a lock is wrong."""
        self.tree.check_integrity()
        self._allocator.check_integrity()
        assert self.writing_blocks >= 0, "a block is in two places"
        assert len(self._damaged) <= self.cached_blocks, "a block outside of the tree is damaged"

    def _slots(self, keys: Keys, salt: bytes, states: Sequence[int]) -> dict[int, int]:
        """Return slots for those states that the tree lacks, as far as there are any."""
        found: dict[int, int] = {}
        for tokens in states:
            if tokens > len(keys):
                continue
            match = self.tree.match(keys[:tokens], salt)
            known = len(match.pages) * self.block_tokens == tokens and self._has_state(match.node)
            if not known and (slot := self.tree.snapshots.allocate()):
                found[tokens] = slot
        return found

    def _with_state(self, match: Match) -> Match:
        """Return the longest part of a prefix at whose end an intact state was saved."""
        match = match.with_state()
        while (saved := match.node.snapshot) is not None and saved.slot in self._damaged_slots:
            parent = match.node.parent
            assert parent is not None
            match = Match(match.pages[: -len(match.node.pages)], parent).with_state()
        return match

    def _has_state(self, node: RadixNode) -> bool:
        """Return whether a node has an intact snapshot; a damaged one that nobody reads is dropped."""
        snapshot = node.snapshot
        if snapshot is None or snapshot.slot not in self._damaged_slots:
            return snapshot is not None
        if not snapshot.pins:
            self.tree.snapshots.drop(snapshot)
        return False

    def _allocate(self, count: int) -> list[int]:
        missing = count - self._allocator.free_pages
        if missing > 0:
            self.evicted_blocks += missing
            self._evict(missing)
        return self._allocator.allocate(count) or []

    def _evict(self, count: int) -> None:
        freed = self.tree.evict(count)
        self._damaged.difference_update(freed)
        self._allocator.free(freed)


def pages_of(blocks: Iterable[int], size: int) -> list[int]:
    """Return the pages that blocks of `size` pages consist of."""
    return [page for block in blocks for page in range(block * size, (block + 1) * size)]
