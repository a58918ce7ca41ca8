"""Spreads work that many requests begin at once over several turns of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8  # placements of long prompts take about a millisecond each


class Turns:
    """Lets at most `per_turn` callers through in one turn of the loop; the others follow in the order of asking.

    A thousand requests that lose their node at the same moment would otherwise all be placed again before the loop
    serves anybody else.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._passed = 0  # in this turn
        self._counting = False  # `_next_turn` is scheduled
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return at once if this turn has room, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_turn)
        if self._passed < self._per_turn and not self._waiting:
            self._passed += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        """Called once per turn while anybody passed or waits."""
        self._passed = 0
        while self._waiting and self._passed < self._per_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # a client that has left was cancelled
                turn.set_result(None)
                self._passed += 1
        self._counting = self._passed > 0
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_turn)
