"""Measures how long a peer has left a question unanswered, which tells a broken connection from an idle one."""

from __future__ import annotations

MAX_FACTOR = 8  # factor of the bound for a peer that stays silent over new connections: its loop is busy


class SilenceWatch:
    """Watches one connection. Any frame from the peer answers everything that was asked before."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._factor = 1
        self._heard_at = now
        self._asked_at: float | None = None

    def heard(self, now: float) -> None:
        self._heard_at, self._asked_at, self._factor = now, None, 1

    def asked(self, now: float) -> None:
        """Note that something was sent that the peer answers."""
        if self._asked_at is None:
            self._asked_at = now

    @property
    def awaits_answer(self) -> bool:
        """True if something was asked that no frame has answered yet."""
        return self._asked_at is not None

    def should_ask(self, now: float) -> bool:
        """Return whether nothing was asked and nothing has been heard for a while."""
        return self._asked_at is None and now - self._heard_at >= self._seconds / 2

    def too_long(self, now: float) -> bool:
        """Return True once per silence that exceeds the bound, which doubles while the peer stays silent."""
        if self._asked_at is None or now - self._asked_at < self._seconds * self._factor:
            return False
        self._asked_at = now
        self._factor = min(2 * self._factor, MAX_FACTOR)
        return True
