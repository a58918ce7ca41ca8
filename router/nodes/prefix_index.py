"""Estimates which prefixes the nodes of one role hold: the blocks of prompts that were recently placed there.

A block is known by its hash, which implies all blocks before it and the salt of its prompt (block_hashes.py), so the
tree of prefixes is a map from hashes to sets of nodes. A set is an integer with one bit per node: finding the longest
prefix of every node takes one pass over the prompt's blocks, whatever the number of nodes.

A node's blocks are forgotten least recently used first, and the later blocks of a prompt before the earlier ones: as
soon as there are more than its pool holds, after some time without use, or when all nodes together have too many.

Knowledge about a node may come from several sources: the prompts that were placed there, and the node's own reports
about each of its memories. Each source has separate blocks, and the longest prefix in any of them counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Memory of one block of one node, measured; see tests/unit/router/nodes/test_prefix_index.py.
BLOCK_BYTES = 280
EXPIRED_PER_CALL = 256  # blocks of one node that a call may forget because they are too old
PLACED = "placed"  # the source of what was placed on a node


@dataclass(slots=True)
class _Holder:
    """The blocks of one node that one source knows."""

    bit: int  # a power of two
    most: int  # blocks that its pool holds
    ttl: float  # seconds after which an unused block is forgotten
    used: OrderedDict[int, float] = field(default_factory=OrderedDict)  # hash -> last use; the oldest first


class NodeBits:
    """The nodes that have blocks."""

    def __init__(self) -> None:
        self.bits: dict[str, int] = {}  # incarnation -> bits of its sources
        self.names: dict[int, str] = {}  # bit -> incarnation

    def add(self, incarnation: str) -> int:
        """Return a bit for one more source of a node."""
        taken = sum(self.names)
        bit = ~taken & (taken + 1)
        self.names[bit] = incarnation
        self.bits[incarnation] = self.bits.get(incarnation, 0) | bit
        return bit

    def drop(self, bit: int) -> None:
        """Forget a source."""
        incarnation = self.names.pop(bit)
        left = self.bits.pop(incarnation) & ~bit
        if left:
            self.bits[incarnation] = left


@dataclass(frozen=True, slots=True)
class PrefixMatches:
    """The longest known prefix of one prompt on each node, until the index changes."""

    nodes: NodeBits
    ends: Sequence[tuple[int, int]] = ()  # (bits of nodes, number of blocks that they hold), ascending
    holders: int = 0  # bits of all of them

    def blocks(self, incarnation: str) -> int:
        """Return how many blocks of the prompt a node holds."""
        bit = self.nodes.bits.get(incarnation, 0)
        if bit & self.holders:
            for nodes, blocks in reversed(self.ends):
                if nodes & bit:
                    return blocks
        return 0


class PrefixIndex:
    """The estimate for the nodes of one role. Used on the event loop only."""

    def __init__(self, max_bytes: int, ttl: float, clock: Callable[[], float]) -> None:
        """
        Args:
            max_bytes: memory that all blocks may take.
            ttl: seconds after which an unused block is forgotten, unless `add` says otherwise.
        """
        self._most = max_bytes // BLOCK_BYTES
        self._ttl = ttl
        self._clock = clock
        self._nodes: dict[tuple[str, str], _Holder] = {}  # (incarnation, source) -> its blocks
        self._order: list[_Holder] = []
        self._known = NodeBits()
        self._holders: dict[int, int] = {}  # hash -> bits of the nodes that hold the block
        self._count = 0
        # The last question; its answer is None after a change.
        self._asked: Sequence[int] = ()
        self._answer: PrefixMatches | None = None
        self._turn = 0  # which node's old blocks the next call forgets

    def __len__(self) -> int:
        """Return the number of blocks; one that several nodes hold counts for each."""
        return self._count

    def match(self, blocks: Sequence[int]) -> PrefixMatches:
        """Return the longest prefix of a prompt on each node. Asking again before a change costs nothing."""
        if blocks is self._asked and self._answer is not None:
            return self._answer
        self._forget_old()
        self._asked, self._answer = blocks, self._match(blocks)
        return self._answer

    def _match(self, blocks: Sequence[int]) -> PrefixMatches:
        holders, ends = self._holders, list[tuple[int, int]]()
        alive = -1
        for count, block in enumerate(blocks):
            nodes = holders.get(block, 0) & alive
            if nodes != alive:
                if count:
                    ends.append((alive & ~nodes, count))
                if not nodes:
                    break
                alive = nodes
        else:
            if blocks:
                ends.append((alive, len(blocks)))
        return PrefixMatches(self._known, ends, holders.get(blocks[0], 0) if ends else 0)

    def add(
        self,
        incarnation: str,
        blocks: Sequence[int],
        most: int,
        source: str = PLACED,
        ttl: float | None = None,
    ) -> None:
        """Note that a node holds a prompt, or will soon. `most`: blocks that its pool can hold."""
        node = self._nodes.get((incarnation, source))
        if node is None:
            node = _Holder(self._known.add(incarnation), most, self._ttl)
            self._nodes[incarnation, source] = node
            self._order.append(node)
        node.most, node.ttl = most, self._ttl if ttl is None else ttl
        used, holders, bit, now = node.used, self._holders, node.bit, self._clock()
        self._answer = None
        # The first block last: it is forgotten after those that follow it.
        for block in reversed(blocks):
            if used.pop(block, None) is None:
                holders[block] = holders.get(block, 0) | bit
                self._count += 1
            used[block] = now
        self._shrink(node)
        self._forget_old()
        while self._count > self._most:
            # Another source has more than its share.
            self._forget_old()

    def touch(self, incarnation: str, blocks: Sequence[int], source: str) -> None:
        """Note that blocks of a prompt are used, as far as they are known."""
        node = self._nodes.get((incarnation, source))
        if node is not None:
            for block in reversed(blocks):
                if block in node.used:
                    node.used.move_to_end(block)

    def remove(self, incarnation: str, blocks: Sequence[int], source: str) -> None:
        """Note that a node no longer holds these blocks; unknown ones are ignored."""
        node = self._nodes.get((incarnation, source))
        if node is not None:
            for block in blocks:
                if node.used.pop(block, None) is not None:
                    self._drop(block, node.bit)

    def forget(self, incarnation: str, source: str | None = None) -> None:
        """Forget a node, which is lost or has emptied its cache, or what one source knows of it."""
        keys = [key for key in self._nodes if key[0] == incarnation and source in (None, key[1])]
        for key in keys:
            node = self._nodes.pop(key)
            for block in node.used:
                self._drop(block, node.bit)
            self._known.drop(node.bit)
            self._answer = None
        if keys:
            self._order = [*self._nodes.values()]

    def clear(self, source: str) -> None:
        """Forget what one source knows of all nodes."""
        for incarnation, of in [*self._nodes]:
            if of == source:
                self.forget(incarnation, source)

    def _shrink(self, node: _Holder) -> None:
        """Forget the oldest blocks beyond a node's pool; of too many altogether, those beyond its source's share."""
        share = self._most // len(self._nodes)
        while len(node.used) > node.most or (self._count > self._most and len(node.used) > share):
            self._drop(node.used.popitem(last=False)[0], node.bit)

    def _forget_old(self) -> None:
        """Forget old blocks of one node, and those beyond its share; each call takes the next node."""
        if not self._nodes:
            return
        self._turn = (self._turn + 1) % len(self._order)
        node = self._order[self._turn]
        before = self._clock() - node.ttl
        for _ in range(EXPIRED_PER_CALL):
            if not node.used or node.used[next(iter(node.used))] >= before:
                break
            self._drop(node.used.popitem(last=False)[0], node.bit)
        self._shrink(node)

    def _drop(self, block: int, bit: int) -> None:
        self._answer = None
        self._count -= 1
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]
