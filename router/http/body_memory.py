"""Bounds the memory that the bodies of all requests take, from their first byte until their prompts are encoded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import Overloaded

SMALL_BODY = 1 << 16  # bytes of a body that needs no reservation
MAX_SMALL = 32 << 20  # bytes of all small bodies that are being received
# Bytes of all other bodies. Each takes two to three times as much while it is worked on.
MAX_RESERVED = 40 << 20
# Bodies that wait for a reservation. The connection of each holds some 256 KiB unread.
MAX_WAITING = 64
BUSY = "too many large bodies are being received; try again later"
# While others wait, an upload is ended once it has taken SLOW_SECONDS at less than MIN_RATE bytes per second.
SLOW_SECONDS = 2.0
MIN_RATE = 256 << 10
# It is also ended after this time if its client has more memory than the one that waits would have.
FAIR_SECONDS = 8.0
LOOK_SECONDS = 0.5  # interval at which slow uploads are looked for while others wait


@dataclass(eq=False, slots=True)
class Reservation:
    """Memory for one body."""

    client: str
    size: int
    since: float  # when it was made
    revoke: Callable[[], None]  # ends the upload; its owner then releases the reservation
    received: int = 0  # bytes so far
    revocable: bool = True  # the body is still arriving

    def rate(self, now: float) -> float:
        """Return the bytes per second."""
        return self.received / max(now - self.since, 1e-9)

    def is_slow(self, now: float) -> bool:
        return now - self.since >= SLOW_SECONDS and self.rate(now) < MIN_RATE


@dataclass(eq=False, slots=True)
class _WaitingBody:
    client: str
    size: int
    revoke: Callable[[], None]
    admitted: asyncio.Future[Reservation]


class BodyMemory:
    """Reserves memory for large bodies in the order of asking.

    One client may have half of it, or one body of any size. While other clients wait, uploads that are slow are ended,
    and long ones of clients that have more than their share: a few clients must not keep everybody else out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: set[Reservation] = set()
        self._reserved = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: list[_WaitingBody] = []
        self._small = 0
        self._look: asyncio.TimerHandle | None = None

    @property
    def reserved(self) -> int:
        """Bytes reserved for large bodies."""
        return self._reserved

    @property
    def small(self) -> int:
        """Bytes of small bodies."""
        return self._small

    def add_small(self, size: int) -> None:
        """Count bytes of a body without a reservation; a negative `size` gives them back. Raises Overloaded."""
        if size > 0 and self._small + size > MAX_SMALL:
            raise Overloaded("too many bodies are being received; try again later")
        self._small += size

    async def reserve(self, client: str, size: int, revoke: Callable[[], None]) -> Reservation:
        """Wait for memory; `release` has to follow. `revoke` is called if the upload has to end for others.

        Raises Overloaded if too many wait already.
        """
        if not self._waiting and self._fits(client, size):
            return self._take(client, size, revoke)
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(BUSY)
        waiter = _WaitingBody(client, size, revoke, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        # Those before it may wait only for the share of their own client.
        self._admit()
        self._look_later()
        try:
            return await asyncio.shield(waiter.admitted)
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._admit()
            else:
                self.release(waiter.admitted.result())
            raise

    def release(self, held: Reservation) -> None:
        """Give a reservation back."""
        self._held.discard(held)
        self._reserved -= held.size
        self._by_client[held.client] -= held.size
        if not self._by_client[held.client]:
            del self._by_client[held.client]
        self._admit()

    def revoke_slowest(self) -> None:
        """End at most one upload for the sake of the body that has waited longest. Called while bodies wait."""
        waiter = next((each for each in self._waiting if self._may_have(each.client, each.size)), None)
        if waiter is None:
            return
        now = self._clock()
        own = self._by_client.get(waiter.client, 0) + waiter.size
        found = [
            held
            for held in self._held
            if held.revocable
            and held.client != waiter.client
            and (
                held.is_slow(now) or (now - held.since >= FAIR_SECONDS and self._by_client[held.client] > own)
            )
        ]
        if found:
            slowest = min(found, key=lambda held: held.rate(now))
            slowest.revocable = False
            slowest.revoke()

    def _admit(self) -> None:
        """Give memory to those whose turn it is."""
        for waiter in list(self._waiting):
            if not self._may_have(waiter.client, waiter.size):
                # It waits for bodies of its own client, whatever memory is free.
                continue
            if not self._has_room(waiter.size):
                # Smaller bodies do not overtake it: it would wait for ever.
                return
            self._waiting.remove(waiter)
            waiter.admitted.set_result(self._take(waiter.client, waiter.size, waiter.revoke))

    def _look_later(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        if self._waiting:
            self.revoke_slowest()
            self._look_later()

    def _has_room(self, size: int) -> bool:
        """Return whether a body fits beside the others. One that is larger than the bound has to be the only one."""
        return not self._reserved or self._reserved + size <= MAX_RESERVED

    def _fits(self, client: str, size: int) -> bool:
        return self._has_room(size) and self._may_have(client, size)

    def _may_have(self, client: str, size: int) -> bool:
        """Return whether a body is within the share of its client."""
        held = self._by_client.get(client, 0)
        return not held or held + size <= MAX_RESERVED // 2

    def _take(self, client: str, size: int, revoke: Callable[[], None]) -> Reservation:
        self._reserved += size
        self._by_client[client] += size
        held = Reservation(client, size, self._clock(), revoke)
        self._held.add(held)
        return held
