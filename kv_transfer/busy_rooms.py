"""Tracks the rooms that every poll has to advance, and how soon the next poll is useful."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kv_transfer.outbound_room import OutboundRoom

SHORTEST: Final = 0.0001  # seconds between two polls while bytes move
# Seconds between two polls of a write that does not end. A longer interval would save nothing more.
LONGEST: Final = 0.01
# The interval as a share of the time since bytes moved last: the end of a write is noticed so much later at most.
SHARE: Final = 0.01


class BusyRooms:
    """The rooms with writes whose end no message announces, or with a record still to be written."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._rooms: dict[int, OutboundRoom] = {}
        self._clock = clock

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._rooms))

    def update(self, room: OutboundRoom, busy: bool) -> bool:
        """Add or remove a room that is `busy` or not, which this returns."""
        if busy:
            self._rooms[room.room] = room
        else:
            self._rooms.pop(room.room, None)
        return busy

    @property
    def draining(self) -> int:
        """Number of rooms that ended with unsettled writes."""
        return sum(room.draining for room in self._rooms.values())

    @property
    def poll_interval(self) -> float | None:
        """Seconds until the next poll; None if every write has settled. It grows while no byte moves."""
        moved = [room.moved_at for room in self._rooms.values() if not room.settled]
        if not moved:
            return None
        return min(max(SHARE * (self._clock() - max(moved)), SHORTEST), LONGEST)
