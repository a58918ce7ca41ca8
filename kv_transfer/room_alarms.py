"""Alarms for rooms that have waited too long: a room is checked when its alarm is due, not in every poll before."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from kv_transfer.outbound_room import OutboundRoom


class RoomAlarms:
    """A heap of the rooms' alarms. Those of ended rooms are removed once the heap is a multiple of the live rooms."""

    def __init__(self, rooms: Mapping[int, OutboundRoom]) -> None:
        """`rooms` is a live view of the rooms that have not ended."""
        self._rooms = rooms
        self._heap: list[tuple[float, int]] = []  # (when, room)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, *rooms: OutboundRoom) -> None:
        """Set the alarms of rooms, of each if there is anything that it waits for."""
        for room in rooms:
            when = room.alarm
            if when < float("inf"):
                heapq.heappush(self._heap, (when, room.room))
        if len(self._heap) > 4 * len(self._rooms) + 64:
            alive = [(each.alarm, each.room) for each in self._rooms.values()]
            self._heap = [alarm for alarm in alive if alarm[0] < float("inf")]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[OutboundRoom]:
        """Remove and return the rooms whose time has come. A room whose alarm is set again is due in a later call."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            room = self._rooms.get(heapq.heappop(self._heap)[1])
            if room is not None:
                found.append(room)
        return found
