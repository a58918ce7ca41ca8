"""Heartbeats between the two ends. They bound every wait: a room that neither end names is lost within seconds.

A prefill node names the rooms that have slots and are processed or queued (Working, sender_heartbeats.py); a decode
node names the rooms that wait for pages (Queued, receiver_heartbeats.py). Both announce long work on their loop before
they begin it.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.messages import MAX_BUSY_MS

HEARTBEAT_SECONDS = 0.5  # between two heartbeats of one end
MIN_ANNOUNCED_SECONDS = 2.0  # shortest work that is announced to the peers before it begins


class Heartbeats:
    """Tracks when heartbeats of one end are due, and for how long that end may be silent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._due_at = clock()
        self._busy_until = clock()

    @property
    def busy_ms(self) -> int:
        """Milliseconds for which the loop may be silent, as heartbeats report it."""
        return min(max(0, int((self._busy_until - self.clock()) * 1000)), MAX_BUSY_MS)

    def due(self) -> bool:
        """Return whether a heartbeat is due now; if so, the next one is due HEARTBEAT_SECONDS later."""
        now = self.clock()
        if now < self._due_at:
            return False
        self._due_at = now + HEARTBEAT_SECONDS
        return True

    def must_announce(self, seconds: float) -> bool:
        """Note that the loop may be busy for `seconds` from now on; return whether peers must be notified first.

        It replaces what was noted before, so that nothing is left of a launch that ended early. Less than
        MIN_ANNOUNCED_SECONDS counts as nothing, because no peer would miss a heartbeat.
        """
        now = self.clock()
        known = max(self._busy_until, now)
        self._busy_until = now + seconds if seconds >= MIN_ANNOUNCED_SECONDS else now
        return self._busy_until - known >= MIN_ANNOUNCED_SECONDS
