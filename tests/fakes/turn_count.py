"""Counts the events that a test notes in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TurnCount:
    """Counts turns of the event loop and the events in each; `counting_turns` makes and runs it."""

    def __init__(self) -> None:
        self.turn = 0
        self.events: Counter[int] = Counter()  # turn -> number of events

    def note(self, events: int = 1) -> None:
        self.events[self.turn] += events

    @property
    def total(self) -> int:
        return self.events.total()

    @property
    def most(self) -> int:
        """Return the number of events of the busiest turn."""
        return max(self.events.values())

    async def run(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


@asynccontextmanager
async def counting_turns() -> AsyncIterator[TurnCount]:
    count = TurnCount()
    task = asyncio.create_task(count.run())
    try:
        yield count
    finally:
        task.cancel()
