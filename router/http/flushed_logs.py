"""Ends the windows of bounded logs on the event loop, so that their counts are logged even if no event follows."""

from __future__ import annotations

import asyncio

from common.observability.bounded_log import WINDOW, BoundedLog


class FlushedLogs:
    """Writes the counts of some logs when their window is over, or when they are closed."""

    def __init__(self, *logs: BoundedLog) -> None:
        self._logs = logs
        self._flush: asyncio.TimerHandle | None = None

    def noted(self) -> None:
        """Note that one of the logs has an event."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(WINDOW, self._end_window)

    def close(self) -> None:
        """Log the counts of a window that is not over yet."""
        if self._flush is not None:
            self._flush.cancel()
        for log in self._logs:
            log.close()

    def _end_window(self) -> None:
        self._flush = None
        for log in self._logs:
            log.flush()
