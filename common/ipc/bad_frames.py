"""Counts bad frames of the peers of one listening socket, logs them at a bounded rate, and cuts a peer off at LIMIT."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from common.observability.bounded_log import BoundedLog

LIMIT = 64  # bad frames of one peer within WINDOW seconds; peers that follow the protocol send none
WINDOW = 10.0
MAX_PEERS = 1024  # remembered peers; beyond it, those that were silent longest are forgotten


class BadFrames:
    """Single-threaded, like its socket. A peer is NAME/INCARNATION for all its links, or the NAME of a key.

    Where several nodes have one key, a peer is one link, NAME/INCARNATION/LINK.
    """

    def __init__(self, log: BoundedLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, how many
        self.cut_off: OrderedDict[str, None] = OrderedDict()  # peers; empty for almost every socket
        self.total = 0

    def count(self, peer: str, reason: str) -> bool:
        """Count a bad frame of `peer`. Returns True if the peer is cut off for this one."""
        self.total += 1
        self._log.warning(peer, reason)
        now = self._clock()
        since, seen = self._counts.pop(peer, (now, 0))
        if now - since > WINDOW:
            since, seen = now, 0
        self._counts[peer] = (since, seen + 1)
        if len(self._counts) > MAX_PEERS:
            self._counts.popitem(last=False)
        if seen + 1 != LIMIT:
            return False
        self.cut_off[peer] = None
        if len(self.cut_off) > MAX_PEERS:
            self.cut_off.popitem(last=False)
        return True

    def is_cut_off(self, peer: str) -> bool:
        return peer in self.cut_off

    def flush(self) -> None:
        """Log what has not been logged yet. Called periodically."""
        self._log.flush()


def peer_of(routing_id: bytes) -> str:
    """Return NAME/INCARNATION of a routing id NAME/INCARNATION[/LINK]; printable and short for any other."""
    return printable(b"/".join(routing_id.split(b"/", 2)[:2]))[:128]


def printable(routing_id: bytes) -> str:
    """Return a whole routing id, which ZMQ limits to 255 bytes, as text."""
    return routing_id.decode("ascii", errors="replace")
