"""Runs suspected requests in a few groups, one group after the other, so that a crash tells which group is to blame.

One suspect at a time would find the culprit with the fewest crashes, but a thousand requests that lost two nodes in a
row would wait for minutes. So the suspects with equally many crashes are divided into at most GROUPS groups. A crash
under a group raises the crash count of its members only, and these are divided again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

GROUPS = 8  # up to this many suspects run one at a time
# Seconds after its placement for which a request keeps the next group waiting.
TRIAL_SECONDS = 1.0


class Trial:
    """The right to run now. `release` ends the isolation and may be called repeatedly."""

    def __init__(self, isolation: Isolation | None = None, companions: int = 0) -> None:
        """`companions`: other suspects of the same group. Without `isolation`, it runs together with all others."""
        self.companions = companions
        self._isolation = isolation
        self._timer: asyncio.TimerHandle | None = None

    @property
    def isolated(self) -> bool:
        return self._isolation is not None

    def placed(self) -> None:
        """Note that the request was sent to its nodes: it keeps others waiting only for a bounded time from now on."""
        if self.isolated and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TRIAL_SECONDS, self.release)

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        isolation, self._isolation = self._isolation, None
        if isolation is not None:
            isolation.ended(self)


NO_TRIAL: Final = Trial()  # of all requests that are not suspected: it runs together with others


@dataclass(eq=False, slots=True)
class _Waiter:
    crashes: int
    admitted: asyncio.Future[Trial]


class Isolation:
    """Admits one group at a time, in order of arrival. Single-threaded."""

    def __init__(self) -> None:
        self._waiting: dict[_Waiter, None] = {}  # in order of arrival
        self._count: Counter[int] = Counter()  # crashes -> waiting requests
        self._size: dict[int, int] = {}  # crashes -> size of their groups, while some of them wait
        self._running: set[Trial] = set()

    async def enter(self, crashes: int, timeout: float) -> Trial:
        """Wait for the turn of this request. After `timeout` seconds it may run without isolation."""
        waiter = _Waiter(crashes, asyncio.get_running_loop().create_future())
        self._waiting[waiter] = None
        self._count[crashes] += 1
        self._admit()
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(waiter.admitted)
        except BaseException as error:
            if waiter in self._waiting:
                self._remove(waiter)
            elif waiter.admitted.done():
                waiter.admitted.result().release()
            if isinstance(error, TimeoutError):
                return NO_TRIAL
            raise

    def ended(self, trial: Trial) -> None:
        """Note the end of an isolated trial."""
        self._running.discard(trial)
        self._admit()

    def _admit(self) -> None:
        """Start the next group if none is running."""
        if self._running or not self._waiting:
            return
        crashes = next(iter(self._waiting)).crashes
        size = max(self._size.get(crashes, 1), -(-self._count[crashes] // GROUPS))
        self._size[crashes] = size
        alike = [waiter for waiter in self._waiting if waiter.crashes == crashes][:size]
        for waiter in alike:
            self._remove(waiter)
            trial = Trial(self, len(alike) - 1)
            self._running.add(trial)
            waiter.admitted.set_result(trial)

    def _remove(self, waiter: _Waiter) -> None:
        del self._waiting[waiter]
        self._count[waiter.crashes] -= 1
        if not self._count[waiter.crashes]:
            del self._count[waiter.crashes]
            self._size.pop(waiter.crashes, None)
