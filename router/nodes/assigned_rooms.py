"""The unfinished requests on one node, and how many of their prompt tokens are still to be computed there."""

from __future__ import annotations

from collections.abc import Iterator


class AssignedRooms:
    """Rooms of a node. Placement asks for `tokens` at every request, so it is not added up each time."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # room -> prompt tokens
        self.tokens = 0  # of all rooms

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[int]:
        return iter(self._left)

    def left(self, room: int) -> int:
        """Return the prompt tokens of a room that are still to be computed; 0 if it is not on the node."""
        return self._left.get(room, 0)

    def add(self, room: int, tokens: int) -> None:
        """Count a request that was placed on the node."""
        self._left[room] = tokens
        self.tokens += tokens

    def computed(self, room: int) -> None:
        """Note that the node has computed the prompt of a room."""
        if room in self._left:
            self.tokens -= self._left[room]
            self._left[room] = 0

    def remove(self, room: int) -> None:
        """Note that the node no longer holds anything of the room. May be called repeatedly."""
        self.tokens -= self._left.pop(room, 0)
