"""Returns the memory that ended connections have freed to the operating system.

libzmq allocates some 50 KiB for each connection. What it frees lies between blocks that are still in use, and glibc
keeps it: the process would stay as large as the largest number of connections it has ever had at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable

TRIM_SECONDS = 10.0


def find_trim() -> Callable[[], None]:
    """Return a function that trims the heap; a no-op in C libraries without `malloc_trim`."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return lambda: None

    def trim() -> None:
        # ctypes releases the GIL. 300 MiB of free memory take 20 ms.
        malloc_trim(ctypes.c_size_t(0))

    return trim


class FreedMemory:
    """Trims the heap after connections have ended, at most every TRIM_SECONDS. Single-threaded."""

    def __init__(
        self, trim: Callable[[], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`trim` runs in a thread; the default is the C library's `malloc_trim`."""
        self._trim = trim or find_trim()
        self._clock = clock
        self._freed = False
        self._trimmed_at = float("-inf")

    def connection_ended(self) -> None:
        """Note that a connection ended: its memory is free, or will be once its last messages are read."""
        self._freed = True

    async def give_back(self) -> None:
        """Trim the heap if that is due. Called periodically."""
        if self._freed and self._clock() - self._trimmed_at >= TRIM_SECONDS:
            self._freed = False
            self._trimmed_at = self._clock()
            await asyncio.to_thread(self._trim)
