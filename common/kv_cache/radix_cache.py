"""Prefix cache: a radix tree over whole pages. A node owns pages; an edge is a run of whole pages of keys.

Keys are one integer per token, or one row of integers (token ids; with a draft that shares the pages, also the ids of
the following tokens), so page p of a sequence is described by keys[p*page_size:(p+1)*page_size]. Only whole pages are
matched or stored.

Sequences with different salts never share a page: the salt precedes the keys of the first page, so each salt has its
own branches below the root. A salt without cached pages takes no memory, and all salts are evicted in one order.

A node that a request uses is locked, together with all its ancestors; an unlocked leaf may be evicted, least recently
used first. Running requests need a page every few steps, and each evicts one once the pool is full, so eviction must
not look at every leaf: unlocked leaves wait in a heap, under the time of their last use when they came into it.

For models that keep a state per request, a node may have a snapshot of the state at its end (snapshots.py). It stays
with the lower half of a split, and is dropped with the last page of its node.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.kv_cache.snapshots import Snapshot, Snapshots

Keys = npt.NDArray[np.int64]


class RadixNode:
    """One edge and its pages; the root has none."""

    __slots__ = ("_snapshot", "children", "keys", "last_used", "locks", "pages", "parent", "queued", "salt")

    def __init__(self, keys: Keys, pages: list[int], parent: RadixNode | None, salt: bytes = b"") -> None:
        self.keys = keys  # [len(pages) * page_size] or [len(pages) * page_size, tokens]
        self.pages = pages
        self.parent = parent
        self.salt = salt  # salt of the sequence; b"" in every node that is not a child of the root
        self.children: dict[bytes, RadixNode] = {}  # salt and keys of the child's first page -> child
        self.locks = 0
        self.last_used = 0
        self.queued = False  # is in the heap of nodes to evict
        # A copy of the state after the node's last page, which may have been dropped.
        self._snapshot: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The saved state at the end of this node; None if there is none, or no longer."""
        found = self._snapshot
        return found if found is not None and found.slot else None

    @snapshot.setter
    def snapshot(self, made: Snapshot) -> None:
        self._snapshot = made


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix; `pages` stay valid only while `node` is locked."""

    pages: list[int]
    node: RadixNode

    def with_state(self) -> Match:
        """Return the longest part of this prefix at whose end the state was saved; nothing if there is none."""
        node, count = self.node, len(self.pages)
        while node.parent is not None and node.snapshot is None:
            count -= len(node.pages)
            node = node.parent
        return Match(self.pages[:count], node)


class CacheObserver(Protocol):
    """Is told which pages a prefix cache takes and gives up; it must not take long."""

    def adopted(self, keys: Keys, pages: Sequence[int], first: int, salt: bytes) -> None:
        """Note that `pages`, which follow the first `first` pages of `keys`, were added to the cache."""
        ...

    def evicted(self, pages: Sequence[int]) -> None: ...


class NoObserver:
    """Ignores everything."""

    def adopted(self, keys: Keys, pages: Sequence[int], first: int, salt: bytes) -> None:
        pass

    def evicted(self, pages: Sequence[int]) -> None:
        pass


NO_OBSERVER = NoObserver()


class PrefixCache(Protocol):
    """The interface of a prefix cache for a node's page bookkeeping; NoPrefixCache never matches."""

    @property
    def cached_pages(self) -> int: ...
    @property
    def evictable_pages(self) -> int: ...
    @property
    def snapshots(self) -> Snapshots: ...
    def match(self, keys: Keys, salt: bytes = b"") -> Match: ...
    def lock(self, node: RadixNode) -> None: ...
    def unlock(self, node: RadixNode) -> None: ...
    def insert(self, keys: Keys, pages: Sequence[int], salt: bytes = b"") -> tuple[RadixNode, int]: ...
    def save(self, keys: Keys, slot: int, salt: bytes = b"") -> None: ...
    def states(self, keys: Keys, salt: bytes = b"") -> dict[int, Snapshot]: ...
    def evict(self, count: int) -> list[int]: ...
    def check_integrity(self) -> None: ...


class RadixCache:
    """A `PrefixCache` over one radix tree, as described in the module's docstring."""

    def __init__(
        self, page_size: int, snapshots: Snapshots | None = None, observer: CacheObserver = NO_OBSERVER
    ) -> None:
        """`snapshots`: slots in which the states of cached prefixes are saved; None: the model keeps no state."""
        self._observer = observer
        self.snapshots = snapshots or Snapshots()
        self._page_size = page_size
        self._root = RadixNode(np.empty(0, np.int64), [], None)
        self._clock = 0
        self._cached = 0
        self._evictable = 0
        # (last use, a number that no other entry has, node): every unlocked leaf once, and nodes that were one. A node
        # that was used since has a time that is too early.
        self._unused: list[tuple[int, int, RadixNode]] = []
        self._numbers = itertools.count()

    @property
    def cached_pages(self) -> int:
        """Number of pages that the tree owns, locked or not."""
        return self._cached

    @property
    def evictable_pages(self) -> int:
        """Number of pages in unlocked nodes: `evict` can return all of them."""
        return self._evictable

    def match(self, keys: Keys, salt: bytes = b"") -> Match:
        """Return the longest prefix of whole pages cached under `salt`, splitting a partially matching edge.

        O(length).
        """
        node, pages = self._descend(keys, len(keys) // self._page_size, salt)
        return Match(pages, node)

    def lock(self, node: RadixNode) -> None:
        """Keep `node` and its ancestors until the matching unlock."""
        for each in self._path(node):
            if each.locks == 0:
                self._evictable -= len(each.pages)
            each.locks += 1

    def unlock(self, node: RadixNode) -> None:
        for each in self._path(node):
            if each.locks == 0:
                raise ValueError("unlock without lock")
            each.locks -= 1
            if each.locks == 0:
                self._evictable += len(each.pages)
                self._offer(each)

    def insert(self, keys: Keys, pages: Sequence[int], salt: bytes = b"") -> tuple[RadixNode, int]:
        """Offer the pages of a computed sequence to later ones with this salt; needs len(keys) >= len(pages) *
        page_size.

        Returns (node, first_adopted): the tree owns pages[first_adopted:] from now on. pages[:first_adopted] are
        already in the tree, possibly under other page ids; those with other ids stay with the caller.
        """
        keys = keys[: len(pages) * self._page_size]
        node, present = self._descend(keys, len(pages), salt)
        first_adopted = len(present)
        if first_adopted == len(pages):
            return node, first_adopted
        rest = keys[first_adopted * self._page_size :].copy()
        child = RadixNode(rest, list(pages[first_adopted:]), node, salt if node is self._root else b"")
        child.last_used = self._clock
        node.children[self._edge(rest, child.salt)] = child
        self._cached += len(child.pages)
        self._evictable += len(child.pages)
        self._offer(child)
        self._observer.adopted(keys, child.pages, first_adopted, salt)
        return child, first_adopted

    def save(self, keys: Keys, slot: int, salt: bytes = b"") -> None:
        """Attach the state after `keys`, which fill whole pages, saved in an allocated slot of `snapshots`.

        The slot is freed if these pages are not cached, or have a snapshot already.
        """
        wanted = len(keys) // self._page_size
        node, pages = self._descend(keys, wanted, salt)
        if len(pages) < wanted or node.snapshot is not None:
            self.snapshots.free((slot,))
            if len(pages) == wanted and node.snapshot is not None:
                self.snapshots.use(node.snapshot)
            return
        node.snapshot = self.snapshots.attach(slot)

    def states(self, keys: Keys, salt: bytes = b"") -> dict[int, Snapshot]:
        """Return the saved states of a prefix by the number of tokens that they follow."""
        node, pages = self._descend(keys, len(keys) // self._page_size, salt)
        found, count = dict[int, Snapshot](), len(pages)
        for each in self._path(node):
            if each.snapshot is not None:
                found[count * self._page_size] = each.snapshot
            count -= len(each.pages)
        return found

    def evict(self, count: int) -> list[int]:
        """Remove least recently used unlocked leaves until at least `count` pages are free; return their pages.

        O(log(nodes)) per removed leaf, apart from the pages.
        """
        freed: list[int] = []
        while len(freed) < count and (node := self._least_used()) is not None:
            # Only the tail of a long edge is evicted: others are more likely to share the front.
            keep = max(len(freed) + len(node.pages) - count, 0)
            freed.extend(node.pages[keep:])
            self._account(keep - len(node.pages))
            if node.snapshot is not None:
                self.snapshots.drop(node.snapshot)
            if keep:
                node.pages = node.pages[:keep]
                node.keys = node.keys[: keep * self._page_size].copy()
                self._offer(node)
            else:
                self._remove(node)
        if freed:
            self._observer.evicted(freed)
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError for a page owned twice, a wrong edge, a lock that its ancestors lack, or a wrong
        count.
        """
        seen: set[int] = set()
        saved: list[Snapshot] = []
        cached = evictable = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            if node is not self._root:
                assert node.pages, "an edge without pages"
                assert len(node.keys) == len(node.pages) * self._page_size, "keys and pages differ in length"
                assert not seen & set(node.pages), "a page is owned twice"
                seen.update(node.pages)
                cached += len(node.pages)
                evictable += len(node.pages) if node.locks == 0 else 0
                if node.snapshot is not None:
                    assert node.locks or not node.snapshot.pins, (
                        "a pinned snapshot of a node that is not locked"
                    )
                    saved.append(node.snapshot)
            for edge, child in node.children.items():
                assert child.parent is node, "a child that does not know its parent"
                assert edge == self._edge(child.keys, child.salt), "an edge under a wrong key"
                assert node is self._root or not child.salt, "a salt below the first edge"
                stack.append(child)
            if node is not self._root:
                assert node.children or node.locks or node.queued, "an unlocked leaf that is never evicted"
                below = sum(child.locks for child in node.children.values())
                assert node.locks >= below, "fewer locks than its children have together"
        queued = [id(node) for _, _, node in self._unused]
        assert len(queued) == len(set(queued)), "a node waits twice to be evicted"
        self.snapshots.check_integrity(saved)
        assert cached == self._cached, (cached, self._cached)
        assert evictable == self._evictable, (evictable, self._evictable)

    def _account(self, pages: int) -> None:
        self._cached += pages
        self._evictable += pages

    def _edge(self, keys: Keys, salt: bytes) -> bytes:
        """Return the edge's key, which is unambiguous: the keys of a page always have the same length."""
        return salt + keys[: self._page_size].tobytes()

    def _path(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield the nodes from `node` up to, not including, the root."""
        current: RadixNode | None = node
        while current is not None and current is not self._root:
            yield current
            current = current.parent

    def _offer(self, node: RadixNode) -> None:
        """Let a node be evicted that may have become an unlocked leaf."""
        if not (node.queued or node.locks or node.children):
            node.queued = True
            heapq.heappush(self._unused, (node.last_used, next(self._numbers), node))

    def _least_used(self) -> RadixNode | None:
        """Take the least recently used unlocked leaf out of the heap."""
        while self._unused:
            used, _, node = heapq.heappop(self._unused)
            node.queued = False
            if used == node.last_used and not (node.locks or node.children):
                return node
            self._offer(node)
        return None

    def _remove(self, node: RadixNode) -> None:
        """Cut off a leaf, which has just been evicted."""
        parent = node.parent
        assert parent is not None
        del parent.children[self._edge(node.keys, node.salt)]
        if parent is not self._root:
            self._offer(parent)

    def _descend(self, keys: Keys, num_pages: int, salt: bytes) -> tuple[RadixNode, list[int]]:
        """Follow at most `num_pages` whole pages of keys, splitting the last edge if it matches partially."""
        self._clock += 1
        node, pages, size = self._root, list[int](), self._page_size
        while len(pages) < num_pages:
            rest = keys[len(pages) * size : num_pages * size]
            child = node.children.get(self._edge(rest, b"" if pages else salt))
            if child is None:
                break
            common = min(len(child.pages), num_pages - len(pages)) * size
            differs = (child.keys[:common] != rest[:common]).reshape(common, -1).any(1)
            matched = (int(differs.argmax()) if differs.any() else common) // size
            if matched < len(child.pages):
                child = self._split(child, matched)
            child.last_used = self._clock
            node = child
            pages.extend(child.pages)
            if matched * size < common:
                break
        return node, pages

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut an edge after `at` pages and return the new upper half. Locks apply to both halves."""
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.pages)
        cut = at * self._page_size
        upper = RadixNode(node.keys[:cut].copy(), node.pages[:at], parent, node.salt)
        upper.locks, upper.last_used = node.locks, node.last_used
        parent.children[self._edge(upper.keys, upper.salt)] = upper
        node.keys, node.pages, node.parent, node.salt = node.keys[cut:].copy(), node.pages[at:], upper, b""
        upper.children[self._edge(node.keys, b"")] = node
        return upper


class NoPrefixCache:
    """A cache that never matches, used if prefix caching is off."""

    def __init__(self) -> None:
        self._root = RadixNode(np.empty(0, np.int64), [], None)
        self.snapshots = Snapshots()

    cached_pages = 0
    evictable_pages = 0

    def match(self, keys: Keys, salt: bytes = b"") -> Match:
        return Match([], self._root)

    def lock(self, node: RadixNode) -> None:
        pass

    def unlock(self, node: RadixNode) -> None:
        pass

    def insert(self, keys: Keys, pages: Sequence[int], salt: bytes = b"") -> tuple[RadixNode, int]:
        return self._root, len(pages)

    def save(self, keys: Keys, slot: int, salt: bytes = b"") -> None:
        self.snapshots.free((slot,))

    def states(self, keys: Keys, salt: bytes = b"") -> dict[int, Snapshot]:
        return {}

    def evict(self, count: int) -> list[int]:
        return []

    def check_integrity(self) -> None:
        pass
