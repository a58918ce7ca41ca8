"""Decides when a node of the other role counts as lost, if several routers report losses.

A router may lose a node that the others still reach. Its report ends its own requests on that pair of nodes, and
nothing else: the peer itself is lost once every router that has sent a request with it has reported it. A router that
never sent one, such as one that was restarted after the peer had died, may not know the peer and never reports it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from common.node.to_router import ToRouter

KEPT = 256  # peers that are remembered; no node has more


@dataclass(slots=True)
class _Peer:
    """The routers that use a peer, and those that have lost it."""

    # They have sent a request with it, and have not reported it since.
    using: set[ToRouter] = field(default_factory=set)
    reported: set[ToRouter] = field(default_factory=set)


class LostPeers:
    """The reports of routers. A report stands until its router sends a request with that peer, or is lost."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()  # by incarnation

    def __len__(self) -> int:
        return len(self._peers)

    def used(self, router: ToRouter, incarnation: str) -> None:
        """Note that `router` has sent a request with this peer, so it can reach it."""
        peer = self._peer(incarnation)
        peer.using.add(router)
        peer.reported.discard(router)

    def report(self, router: ToRouter, incarnation: str) -> bool:
        """Note that `router` has lost this peer; return whether all that used it have."""
        peer = self._peer(incarnation)
        peer.using.discard(router)
        peer.reported.add(router)
        if peer.using:
            return False
        del self._peers[incarnation]
        return True

    def forget_router(self, router: ToRouter) -> list[str]:
        """Drop the reports of a lost router; return the peers that every other router that used them has lost."""
        lost = []
        for incarnation, peer in list(self._peers.items()):
            peer.using.discard(router)
            peer.reported.discard(router)
            if not peer.using:
                del self._peers[incarnation]
                if peer.reported:
                    lost.append(incarnation)
        return lost

    def _peer(self, incarnation: str) -> _Peer:
        peer = self._peers.setdefault(incarnation, _Peer())
        self._peers.move_to_end(incarnation)
        if len(self._peers) > KEPT:
            self._peers.popitem(last=False)
        return peer
