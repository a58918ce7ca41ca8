"""Signs of life between the two ends. They bound every wait: a room that neither end names is lost within seconds.

A prefill node names the rooms that have slots and are processed or queued (Working, sender_signs.py); a decode node
names the rooms that wait for pages (Queued, receiver_signs.py). Both announce long work on their loop before they begin
it.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.messages import MAX_BUSY_MS

SIGN_SECONDS = 0.5  # between two signs of one end
LONG_SECONDS = 2.0  # shortest work that is announced to the peers before it begins


class Signs:
    """Tracks when signs of one end are due, and for how long that end may be silent."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._due_at = clock()
        self._busy_until = clock()

    @property
    def busy_ms(self) -> int:
        """Milliseconds for which the loop may be silent, as signs report it."""
        return min(max(0, int((self._busy_until - self.clock()) * 1000)), MAX_BUSY_MS)

    def due(self) -> bool:
        """Return whether a sign is due now; if so, the next one is due SIGN_SECONDS later."""
        now = self.clock()
        if now < self._due_at:
            return False
        self._due_at = now + SIGN_SECONDS
        return True

    def must_tell(self, seconds: float) -> bool:
        """Note that the loop will be busy for `seconds`; return whether peers must be notified first."""
        before, self._busy_until = self._busy_until, max(self._busy_until, self.clock() + seconds)
        return seconds >= LONG_SECONDS and self._busy_until - before >= LONG_SECONDS
