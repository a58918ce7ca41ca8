"""Log lines about other processes, at a bounded rate."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from common.observability.logs import Log

FIRST = 5  # lines of a window that are written at once
WINDOW = 10.0  # seconds
MAX_PEERS = 8  # listed in the summary


class BoundedLog:
    """Logs one kind of event: the first few of a window at once, the others as a count in one line at its end.

    `warning` or `info`, whichever is called, is also the level of that line.

    Thread-safe. A window ends at the first event or `flush` after WINDOW seconds.
    """

    def __init__(self, log: Log, event: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._event = event
        self._clock = clock
        self._lock = threading.Lock()
        self._since = -WINDOW
        self._written = 0
        self._write = log.warning
        self._suppressed: Counter[str] = Counter()  # by peer, the most frequent ones
        self.total = 0

    def warning(self, peer: str, reason: str, **fields: object) -> None:
        """Log that `peer` was refused for `reason`."""
        self._add(self._log.warning, peer, reason, fields)

    def info(self, peer: str, reason: str, **fields: object) -> None:
        """Log that `peer` was refused for `reason`, where that is its own fault."""
        self._add(self._log.info, peer, reason, fields)

    def _add(self, write: Callable[..., None], peer: str, reason: str, fields: dict[str, object]) -> None:
        with self._lock:
            self._write = write
            self.total += 1
            self._end_window()
            if self._written < FIRST:
                self._written += 1
                write(self._event, peer=peer, reason=reason, **fields)
            elif peer in self._suppressed or len(self._suppressed) < MAX_PEERS:
                self._suppressed[peer] += 1
            else:
                self._suppressed["others"] += 1

    def flush(self) -> None:
        """Write the summary of a window that is over. Called periodically, since the events may have stopped."""
        with self._lock:
            self._end_window()

    def close(self) -> None:
        """Write the summary of a window that is not over yet: the process ends."""
        with self._lock:
            self._summarise(self._clock())

    def _end_window(self) -> None:
        now = self._clock()
        if now - self._since >= WINDOW:
            self._summarise(now)

    def _summarise(self, now: float) -> None:
        if self._suppressed:
            self._write(
                f"{self._event}: not logged individually",
                count=self._suppressed.total(),
                seconds=round(now - self._since, 1),
                peers=dict(self._suppressed),
            )
        self._since, self._written = now, 0
        self._suppressed.clear()
