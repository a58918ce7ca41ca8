"""Adds what nodes report about their caches (KV events) to the estimate of prefixes, if a policy needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from common.kv_events.wire import CPU, GPU
from common.messages.identity import Role
from router.nodes.prefix_index import PLACED, PrefixIndex
from router.nodes.registry import Node

MEDIA = (GPU, CPU)  # blocks elsewhere are ignored: a node would have to fetch them


class ReportedBlocks:
    """The blocks that nodes report to hold. Used on the event loop only."""

    def __init__(self, indexes: Mapping[Role, PrefixIndex], block_tokens: int) -> None:
        """`indexes`: of the roles whose policy asks for it."""
        self._indexes = indexes
        self._block_tokens = block_tokens
        self.following: set[str] = set()  # incarnations of nodes whose events have all been read so far

    @property
    def roles(self) -> frozenset[Role]:
        """The roles whose nodes are to be heard."""
        return frozenset(self._indexes)

    def stored(self, node: Node, medium: str | None, blocks: Sequence[int]) -> None:
        """Note that a node holds these blocks, in their order in a prompt."""
        source, index = medium or GPU, self._indexes.get(node.role)
        if index is not None and source in MEDIA:
            pool = node.register.total_pages * node.register.page_size
            most = pool if source == GPU else max(pool, node.load.host_total_tokens)
            index.remove(node.incarnation, blocks, PLACED)
            index.add(node.incarnation, blocks, most // self._block_tokens + 1, source, math.inf)

    def removed(self, node: Node, medium: str | None, blocks: Sequence[int]) -> None:
        """Note that a node no longer holds these blocks on this medium."""
        index = self._indexes.get(node.role)
        if index is not None:
            index.remove(node.incarnation, blocks, medium or GPU)
            index.remove(node.incarnation, blocks, PLACED)

    def cleared(self, node: Node) -> None:
        """Note that a node holds nothing."""
        index = self._indexes.get(node.role)
        if index is not None:
            for source in MEDIA:
                index.forget(node.incarnation, source)

    def lost(self, node: Node) -> None:
        """Forget what a node has said; nothing more is to be heard of it."""
        self.cleared(node)
        self.following.discard(node.incarnation)

    def used(self, node: Node, blocks: Sequence[int]) -> None:
        """Note that a prompt was placed where it may be cached: of too many blocks, these are forgotten last."""
        index = self._indexes.get(node.role)
        if index is not None:
            for source in MEDIA:
                index.touch(node.incarnation, blocks, source)
