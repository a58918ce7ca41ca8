"""Log lines about connections that are closed because too many are open, at a bounded rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from common.observability.bounded_log import WINDOW, BoundedLog
from common.observability.logs import Log


class ConnectionLog:
    """Logs the first few closed connections of a window, then how many more there were. Used on the event loop only."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._closed = BoundedLog(log, "closed a new connection", clock)
        self._flush: asyncio.TimerHandle | None = None

    def note(self, client: str, reason: str) -> None:
        """Log that a new connection of this client was closed."""
        self._closed.warning(client, reason)
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(WINDOW, self._end_window)

    def _end_window(self) -> None:
        self._flush = None
        self._closed.flush()
