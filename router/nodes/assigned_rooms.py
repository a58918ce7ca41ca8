"""The unfinished requests on one node, and how much of their prompts is still to be computed there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class _Left(NamedTuple):
    """The part of one prompt that a node has not computed."""

    tokens: int
    ms: float  # predicted by the node's own times


NOTHING_LEFT = _Left(0, 0.0)


class AssignedRooms:
    """Rooms of a node. Placement asks for `ms` at every request, so it is not added up each time."""

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}
        self._computing = 0  # rooms with tokens left
        self.tokens = 0  # prompt tokens of all rooms that are not computed yet
        self.ms = 0.0  # predicted milliseconds until these are computed

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[int]:
        return iter(self._left)

    def left(self, room: int) -> int:
        """Return the prompt tokens of a room that are still to be computed; 0 if it is not on the node."""
        return self._left.get(room, NOTHING_LEFT).tokens

    def add(self, room: int, tokens: int, ms: float = 0.0) -> None:
        """Count a request that was placed on the node, whose prompt takes `ms` there."""
        self._left[room] = _Left(tokens, ms)
        self._computing += tokens > 0
        self.tokens += tokens
        self.ms += ms

    def computed(self, room: int) -> None:
        """Note that the node has computed the prompt of a room."""
        if room in self._left:
            self._settle(self._left[room])
            self._left[room] = NOTHING_LEFT

    def remove(self, room: int) -> None:
        """Note that the node no longer holds anything of the room. May be called repeatedly."""
        self._settle(self._left.pop(room, NOTHING_LEFT))

    def _settle(self, left: _Left) -> None:
        self._computing -= left.tokens > 0
        self.tokens -= left.tokens
        # Without any prompt, rounding errors of the sums end.
        self.ms = max(self.ms - left.ms, 0.0) if self._computing else 0.0
