"""Wakes the one task that waits for something."""

from __future__ import annotations

import asyncio


class Wakeup:
    """An event for a single waiter. `asyncio.Event`, which has many, costs several times as much."""

    __slots__ = ("_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    def future(self) -> asyncio.Future[None]:
        """Return what is done at the next `set`. Await it only while `is_set` is False."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
