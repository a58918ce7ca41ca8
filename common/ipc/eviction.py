"""Ends a peer's connection to a ROUTER socket, for which libzmq has no call of its own.

A connection of our own takes the peer's routing id (ROUTER_HANDOVER). libzmq then reads nothing more from the peer's
connection, whatever is sent on it, and closes it by its heartbeat timeout.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import zmq

INTERVAL = 0.5  # seconds between two evictions: a peer that reconnects at once must not keep us busy with it


class Eviction:
    """Of one ROUTER socket that has ROUTER_HANDOVER and is not bound yet."""

    def __init__(self, router: zmq.Socket[bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._context = router.context
        self._clock = clock
        self._address = f"inproc://eviction-{secrets.token_hex(16)}"  # reachable from this process only
        self._at = -INTERVAL
        router.bind(self._address)

    def evict(self, routing_id: bytes) -> None:
        """At most once per INTERVAL: a peer that goes on is evicted by one of its next frames."""
        now = self._clock()
        if now - self._at < INTERVAL:
            return
        self._at = now
        usurper = self._context.socket(zmq.DEALER)
        try:
            usurper.setsockopt(zmq.LINGER, 0)
            usurper.setsockopt(zmq.IDENTITY, routing_id)
            usurper.connect(self._address)
        finally:
            usurper.close()
