"""Finds decode nodes that are gone although no router has reported it.

Routers report the loss of a node. One that was restarted while the node ended never knew it, and the memory of the
ended process would stay mapped here: its successor might find no room for a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kv_transfer.handshake import Peer

LOOK_SECONDS: Final = 5.0  # between two looks, each of which sends a small probe to every decode node
ABSENT_SECONDS: Final = 15.0  # without a connection, after which a decode node has to greet this node again


class AbsentPeers:
    """Tracks how long decode nodes have been unreachable."""

    def __init__(self, reachable: Callable[[bytes], bool]) -> None:
        """`reachable(routing id)`: whether that decode node is connected."""
        self._reachable = reachable
        self._since: dict[str, float] = {}  # incarnation -> the first look that did not reach it
        self._look_at = 0.0

    def look(self, peers: Iterable[Peer], now: float) -> list[Peer]:
        """Return those of `peers` that have been absent for too long; none between two looks."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_SECONDS
        absent = [peer for peer in peers if not self._reachable(peer.identity)]
        self._since = {peer.incarnation: self._since.get(peer.incarnation, now) for peer in absent}
        return [peer for peer in absent if now - self._since[peer.incarnation] >= ABSENT_SECONDS]
