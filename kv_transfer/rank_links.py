"""The links of a decode rank to prefill ranks. Callers name only rank 0 of a prefill node, which names the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.errors import HandshakeRefused, Overloaded, Unavailable
from common.kv_cache.pool_layout import PoolLayout
from common.messages.identity import rank_incarnation
from kv_transfer.cuts import sources
from kv_transfer.inbound import Dial, Link, LinkState


class RankLinks:
    """Holds all links and finds those that a room needs."""

    def __init__(self, layout: PoolLayout, max_peers: int, clock: Callable[[], float]) -> None:
        """`layout` is that of this rank."""
        self.links: dict[str, Link] = {}  # by incarnation
        self._layout = layout
        self._max_peers = max_peers
        self._clock = clock

    def greet(self, peer: str, send: Callable[[bytes], object], dial: Dial | None) -> Link:
        """Return the link to a peer to which Hello is about to be sent. Raises Overloaded at max_peers."""
        if len(self.links) >= self._max_peers and peer not in self.links:
            raise Overloaded(
                f"this decode node is already connected to {len(self.links)} prefill nodes (limit: max_peers)"
            )
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = Link(peer, send, self._clock())
        link.send, link.greeted_at, link.state = send, self._clock(), LinkState.GREETING
        link.dial = dial if self._layout.tp_rank == 0 else None
        return link

    def of(self, peers: Iterable[str]) -> list[Link]:
        """Return the links to these ranks and, where a rank 0 has named the others, to all that this rank needs.

        Raises Unavailable if one of them is not connected.
        """
        found: dict[str, Link] = {}
        for peer in peers:
            found[peer] = self._connected(peer)
            for other in self._others(found[peer]):
                found[other] = self._connected(other)
        return list(found.values())

    def dial(self, incarnation: str, connect: Callable[[str, Callable[[bytes], object]], None]) -> None:
        """Dial the ranks that this rank 0 has named and that are needed and not connected, and `connect` to each.

        Raises HandshakeRefused if rank 0 contradicts itself, and whatever dialing raises.
        """
        leader = self.links.get(incarnation)
        if leader is None or leader.dial is None or leader.state is not LinkState.READY:
            return
        rank, size = leader.ranks
        if size == 1 or rank != 0:
            return
        named = len(set(leader.addresses))
        if (named, len(leader.addresses)) != (size, size):
            raise HandshakeRefused(
                f"prefill node {leader.node} has {size} ranks and names {len(leader.addresses)} addresses, {named} of "
                "them different; restart that node"
            )
        for other, number in self._others(leader).items():
            link = self.links.get(other)
            if link is None or link.state is LinkState.LOST:
                connect(other, leader.dial(other, leader.addresses[number]))
                self.links[other].expected = (number, size)

    def _others(self, link: Link) -> dict[str, int]:
        """Return the needed ranks besides this one as incarnation -> rank; none unless this is a rank 0 that dials."""
        rank, size = link.ranks
        if size == 1 or rank != 0 or link.dial is None or link.state is not LinkState.READY:
            return {}
        needed = sources(self._layout.spec, size, self._layout.tp_rank, self._layout.tp_size)
        return {rank_incarnation(link.incarnation, each): each for each in sorted(needed - {0})}

    def _connected(self, peer: str) -> Link:
        link = self.links.get(peer)
        if link is None or link.state is LinkState.LOST:
            raise Unavailable(f"prefill node {peer} is not connected")
        return link
