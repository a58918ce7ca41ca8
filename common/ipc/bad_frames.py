"""Bad frames of the peers of one listening socket: counted, logged at a bounded rate, and ended after LIMIT of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from common.observability.bounded_log import BoundedLog

LIMIT = 64  # bad frames of one peer within WINDOW seconds; nobody who keeps the protocol sends any
WINDOW = 10.0
MAX_PEERS = 1024  # remembered; beyond it the ones not heard of for longest are forgotten


class BadFrames:
    """Single-threaded, as its socket is. A peer is NAME/INCARNATION, whatever its links, or the NAME of a key."""

    def __init__(self, log: BoundedLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._counts: OrderedDict[str, tuple[float, int]] = OrderedDict()  # since when, and how many
        self._cut_off: OrderedDict[str, None] = OrderedDict()
        self.total = 0

    def count(self, peer: str, reason: str) -> bool:
        """A bad frame of `peer`. True if it is the one for which the peer is cut off."""
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
        self._cut_off[peer] = None
        if len(self._cut_off) > MAX_PEERS:
            self._cut_off.popitem(last=False)
        return True

    def is_cut_off(self, peer: str) -> bool:
        return peer in self._cut_off

    @property
    def anybody_cut_off(self) -> bool:
        """For sockets that have nobody to ignore, which is nearly all of them."""
        return bool(self._cut_off)

    def flush(self) -> None:
        """Log what is not logged yet. Called from time to time."""
        self._log.flush()


def peer_of(routing_id: bytes) -> str:
    """NAME/INCARNATION of a routing id of the form NAME/INCARNATION[/LINK]; printable and short for any other."""
    parts = routing_id.split(b"/", 2)[:2]
    return b"/".join(parts).decode("ascii", errors="replace")[:128]
