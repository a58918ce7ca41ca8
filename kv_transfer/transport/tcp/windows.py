"""Tracks which bytes of the receiver's memory each peer may write: the fence of the TCP transport."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable

from common.kv_cache.plane import Kept
from common.kv_cache.pool_layout import PoolLayout
from kv_transfer.transport.base import Region, Window
from kv_transfer.transport.tcp.frames import Frame, Violation


class Windows:
    """Open windows, shared by the node's thread and the I/O thread.

    Bytes land only inside `land`, under the lock; so nothing of a generation lands once `revoke` has returned.
    Generations grow: one without a window that is at or below the highest announced one was revoked; one above it was
    never announced and is a protocol violation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Window] = {}
        self._highest = 0
        self._starts: list[int] = []

    def use(self, layout: PoolLayout, record_bytes: int) -> None:
        self._layout = layout
        self._record_bytes = record_bytes
        self._starts = [plane.offset for plane in layout.placed]

    def announce(self, window: Window) -> None:
        with self._lock:
            self._open[window.generation] = window
            self._highest = max(self._highest, window.generation)

    def revoke(self, generation: int) -> None:
        with self._lock:
            self._open.pop(generation, None)

    def revoke_all_of(self, incarnation: str) -> None:
        with self._lock:
            for generation in [g for g, window in self._open.items() if window.incarnation == incarnation]:
                del self._open[generation]

    def admits(self, frame: Frame, incarnation: str) -> bool:
        """Return False if the frame's window was closed. Raises Violation for a frame that was never allowed."""
        with self._lock:
            window = self._open.get(frame.generation)
            if window is None and frame.generation <= self._highest:
                return False
        if window is None or window.incarnation != incarnation:
            raise Violation("unannounced", f"generation {frame.generation} is not for this peer")
        if not self._inside(frame, window):
            raise Violation("unannounced", f"{frame} lies outside of its window")
        return True

    def land(self, generation: int, read: Callable[[], int]) -> int | None:
        """Run `read`, which must not block, if the window is still open; return None if it is not."""
        with self._lock:
            return read() if generation in self._open else None

    def _inside(self, frame: Frame, window: Window) -> bool:
        if frame.region is Region.RECORDS:
            start = window.record_slot * self._record_bytes
            return start <= frame.offset and frame.end <= start + self._record_bytes
        index = bisect.bisect_right(self._starts, frame.offset) - 1
        placed = self._layout.placed[index]
        first = (frame.offset - placed.offset) // placed.page_bytes
        last = (frame.end - 1 - placed.offset) // placed.page_bytes
        if last >= placed.items:
            return False
        if placed.plane.kept is Kept.PER_REQUEST:
            return window.state_slot > 0 and first == last == window.state_slot
        return all(page in window.pages for page in range(first, last + 1))
