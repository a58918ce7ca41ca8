"""Finds requests that wait for pages or record slots that only the end of a quarantine can free.

A quarantine ends when the prefill node proves that it writes no more. A process that was stopped proves nothing until
it continues, so no request may wait for that.
"""

from __future__ import annotations

from decode_node.queues import Queues
from decode_node.request import DecodeRequest

MAX_SECONDS = 5.0  # seconds; a process that ended is noticed, and an abort answered, well before


class QuarantineWait:
    """Measures how long only quarantines have held pages while requests wait for some."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._since: float | None = None

    def overdue(self, frees_pages: bool, now: float) -> list[DecodeRequest]:
        """Return the requests that have waited for too long. `frees_pages`: pages of retracted ones become free."""
        queues = self._queues
        waits = queues.retracted or queues.waiting
        if not waits or not queues.quarantined or frees_pages or any(True for _ in queues.holding()):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > MAX_SECONDS:
            self._since = None
            return [*queues.retracted, *queues.waiting]
        return []
