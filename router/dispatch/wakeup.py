"""Wakes the one task that waits for something."""

from __future__ import annotations

import asyncio

import msgspec


class Wakeup(msgspec.Struct, eq=False):
    """An event for a single waiter. `asyncio.Event`, which has many, costs several times as much."""

    is_set: bool = False
    waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    def future(self) -> asyncio.Future[None]:
        """Return what is done at the next `set`. Await it only while `is_set` is False."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter
