"""Log lines about connections that are closed because too many are open, at a bounded rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from router.http.flushed_logs import FlushedLogs


class ConnectionLog:
    """Logs the first few closed connections of a window, then how many more there were. Used on the event loop only."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._closed = BoundedLog(log, "closed a new connection", clock)
        self._flushed = FlushedLogs(self._closed)

    def note(self, client: str, reason: str) -> None:
        """Log that a new connection of this client was closed."""
        self._closed.warning(client, reason)
        self._flushed.noted()

    def close(self) -> None:
        """Log the count of a window that is not over yet."""
        self._flushed.close()
