"""Bounds the memory that the bodies of all requests take, from their first byte until their prompts are encoded."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from common.errors import Overloaded

SMALL_BODY = 1 << 16  # bytes of a body that needs no reservation
MAX_SMALL = 32 << 20  # bytes of all small bodies that are being received
# Bytes of all other bodies. Each takes two to three times as much while it is worked on.
MAX_RESERVED = 40 << 20
# Bodies that wait for a reservation. The connection of each holds some 256 KiB unread.
MAX_WAITING = 64
BUSY = "too many large bodies are being received; try again later"


@dataclass(eq=False, slots=True)
class _Waiter:
    client: str
    size: int
    admitted: asyncio.Future[None]


class BodyMemory:
    """Reserves memory for large bodies in the order of asking.

    One client may have half of it, or one body of any size: clients that send slowly must not keep everybody else out.
    """

    def __init__(self) -> None:
        self._reserved = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: list[_Waiter] = []
        self._small = 0

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

    async def reserve(self, client: str, size: int) -> None:
        """Wait for memory; `release` has to follow. Raises Overloaded if too many wait already."""
        if not self._waiting and self._fits(client, size):
            self._take(client, size)
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Overloaded(BUSY)
        waiter = _Waiter(client, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.admitted
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.release(client, size)
            raise

    def release(self, client: str, size: int) -> None:
        """Give back what `reserve` returned for."""
        self._reserved -= size
        self._by_client[client] -= size
        if not self._by_client[client]:
            del self._by_client[client]
        for waiter in list(self._waiting):
            if not self._has_room(waiter.size):
                # Smaller bodies do not overtake it: it would wait for ever.
                return
            if self._fits(waiter.client, waiter.size):
                self._waiting.remove(waiter)
                self._take(waiter.client, waiter.size)
                if not waiter.admitted.done():
                    waiter.admitted.set_result(None)

    def _has_room(self, size: int) -> bool:
        """Whether a body fits in addition to the others. One beyond the bound is received when there are no others."""
        return not self._reserved or self._reserved + size <= MAX_RESERVED

    def _fits(self, client: str, size: int) -> bool:
        held = self._by_client.get(client, 0)
        return self._has_room(size) and (not held or held + size <= MAX_RESERVED // 2)

    def _take(self, client: str, size: int) -> None:
        self._reserved += size
        self._by_client[client] += size
