"""Finds the current connection of a peer. A peer that dials again has a new routing id; its name stays the same.

If the peer of a ROUTER socket connects a second time under one routing id, the socket detaches the earlier
connection. libzmq 4.3.5 never closes a detached connection on which another message arrives, not even when its peer
does: the descriptor leaks (the engine stops reading and waits for a pipe that no longer exists). So each dial has its
own routing id, and the earlier connection is read until it ends.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from functools import lru_cache

MARK = b"~"  # separates the name of a peer from the number of its dial
_DIGITS = 16
# Remembered peers; beyond it, those that were silent longest are forgotten until their next frame.
MAX_PEERS = 16_384


def dial_id(peer: bytes) -> bytes:
    """Return the routing id of the next connection of `peer`; later ones compare greater, also across processes."""
    return peer + MARK + f"{time.monotonic_ns():0{_DIGITS}x}".encode()


@lru_cache(maxsize=4096)
def peer_name(routing_id: bytes) -> bytes:
    """Return the peer that dialled under `routing_id`; a routing id of another form is the name of its peer."""
    name, mark, number = routing_id.rpartition(MARK)
    return name if mark and len(number) == _DIGITS else routing_id


class Routes:
    """The newest connection of each peer. Single-threaded, like its socket."""

    def __init__(self) -> None:
        self._newest: OrderedDict[bytes, bytes] = OrderedDict()  # peer -> routing id; longest silent first

    def heard(self, peer: bytes, routing_id: bytes) -> None:
        """Note an allowed frame from `routing_id`, a connection of `peer`."""
        known = self._newest.get(peer)
        if known == routing_id:
            self._newest.move_to_end(peer)
        elif known is None or known < routing_id:
            self._newest[peer] = routing_id
            self._newest.move_to_end(peer)
            if len(self._newest) > MAX_PEERS:
                self._newest.popitem(last=False)

    def to(self, peer: bytes) -> bytes:
        """Return the routing id under which `peer` was heard last."""
        return self._newest.get(peer, peer)
