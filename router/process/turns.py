"""Spreads work that many requests or connections start at the same moment over turns of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

PER_TURN = 4  # placing a request with a long prompt takes about a millisecond
Step = Callable[[], bool]  # False if there was nothing to do


class Turns:
    """Lets at most `per_turn` callers through in one turn of the event loop; the others follow in order.

    Without this, a thousand requests that lose their node at the same moment would all be placed again before the loop
    serves anything else.
    """

    def __init__(
        self,
        per_turn: int = PER_TURN,
        seconds: float = float("inf"),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """End a turn also once `seconds` have passed since its first call; one call is always made."""
        self._per_turn = per_turn
        self._seconds = seconds
        self._timed = seconds != float("inf")
        self._clock = clock
        self._passed = 0  # callers that passed in this turn
        self._until = 0.0  # when this turn ends for callers, by the clock
        self._counting = False  # `_next_turn` is scheduled
        self._waiting: deque[Step] = deque()

    async def wait(self) -> None:
        """Return at once if this turn has room, otherwise in a later one."""
        if self.passes():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def let_through() -> bool:
            if turn.done():  # cancelled: the client has disconnected
                return False
            turn.set_result(None)
            return True

        self._waiting.append(let_through)
        await turn

    def call(self, function: Callable[[], None]) -> bool:
        """Call `function` at once and return True if this turn has room; otherwise call it in a later turn."""
        if self.passes():
            function()
            return True

        def step() -> bool:
            function()
            return True

        self._waiting.append(step)
        return False

    def passes(self) -> bool:
        """Return whether the caller may go on at once. Where not, it has to `wait`: this spares most of them that."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._waiting or self._passed >= self._per_turn or (self._timed and not self._turn_goes_on()):
            return False
        self._passed += 1
        return True

    def _turn_goes_on(self) -> bool:
        """Return whether another caller may pass in this turn."""
        if self._passed >= self._per_turn:
            return False
        if not self._timed:
            return True
        if not self._passed:
            self._until = self._clock() + self._seconds
            return True
        return self._clock() < self._until

    def _next_turn(self) -> None:
        """Start a new turn. Scheduled once per turn while callers pass or wait."""
        self._passed = 0
        try:
            while self._waiting and self._turn_goes_on():
                self._passed += self._waiting.popleft()()
        finally:
            # If a call raises, the loop logs it; the remaining calls must still get their turn.
            self._counting = self._passed > 0 or bool(self._waiting)
            if self._counting:
                asyncio.get_running_loop().call_soon(self._next_turn)
