"""Decides when a node of the other role counts as lost, if several routers report losses.

A router may lose a node that the others still reach. Its report ends its own requests on that pair of nodes, and
nothing else: the peer itself is lost once every router that serves this node has reported it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from common.node.to_router import ToRouter

KEPT = 256  # peers with reports; a node has no more peers than that


class LostPeers:
    """The reports of routers. A report stands until its router sends a request with that peer, or is lost."""

    def __init__(self) -> None:
        self._reported: OrderedDict[str, set[ToRouter]] = OrderedDict()  # incarnation -> routers

    def __len__(self) -> int:
        return len(self._reported)

    def report(self, router: ToRouter, incarnation: str, registered: Collection[ToRouter]) -> bool:
        """Note that `router` has lost this peer; return whether all `registered` routers have."""
        self._reported.setdefault(incarnation, set()).add(router)
        self._reported.move_to_end(incarnation)
        if len(self._reported) > KEPT:
            self._reported.popitem(last=False)
        return self._unanimous(incarnation, registered)

    def withdraw(self, router: ToRouter, incarnation: str) -> None:
        """Note that `router` uses this peer again."""
        routers = self._reported.get(incarnation)
        if routers is not None:
            routers.discard(router)
            if not routers:
                del self._reported[incarnation]

    def forget_router(self, router: ToRouter, registered: Collection[ToRouter]) -> list[str]:
        """Drop the reports of a router that is lost; return the peers that all `registered` routers have lost."""
        for incarnation in list(self._reported):
            self.withdraw(router, incarnation)
        return [each for each in list(self._reported) if self._unanimous(each, registered)]

    def _unanimous(self, incarnation: str, registered: Collection[ToRouter]) -> bool:
        if not self._reported[incarnation].issuperset(registered):
            return False
        del self._reported[incarnation]
        return True
