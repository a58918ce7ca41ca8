"""The unfinished requests on one node, and how much of their prompts is still to be computed there.

Those of this router are known one by one, those of other routers as the node's last heartbeat reported them. Other
routers see the same heartbeats and place requests by them as this one does: until the next heartbeat, each request that
is placed here counts once for every router, so that they do not all fill the same node.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from common.messages.identity import NodeLoad, OtherRouters
from router.nodes.prompt_times import NO_TIME, PromptTime


class _Left(msgspec.Struct, frozen=True):
    """The part of one prompt that a node has not computed."""

    tokens: int
    time: PromptTime  # predicted by the node's own times


NOTHING_LEFT = _Left(0, NO_TIME)


class AssignedRooms:
    """Rooms of a node.

    Placement reads the sums of many nodes for each request, and a request changes those of two nodes a few times, so
    they are kept up to date.

    Attributes:
        tokens: prompt tokens of all rooms that are not computed yet.
        ms: predicted milliseconds that the prompts take before one that is placed now, whose own forwards are extra.
            The oldest one has forwards of its own, which later prompts cannot share because they run already. The
            others share theirs, with the new one too.
        expected: number of requests on the node, those of other routers as predicted.
        requests: the same, or what the node has reported if that is more.
    """

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}
        self._computing: dict[int, _Left] = {}  # those with tokens left, in order of assignment
        self._shared = 0.0  # milliseconds that their prompts add to shared forwards
        self.tokens = 0
        self.ms = 0.0
        self.expected = self.requests = 0
        self._reported = 0
        self._others = OtherRouters()
        self._others_ms = 0.0
        self._placed, self._placed_ms = 0, 0.0  # since the last heartbeat

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[int]:
        return iter(self._left)

    def left(self, room: int) -> int:
        """Return the prompt tokens of a room that are still to be computed; 0 if it is not on the node."""
        return self._left.get(room, NOTHING_LEFT).tokens

    def heard(self, load: NodeLoad, others: OtherRouters) -> None:
        """Take note of a heartbeat."""
        self._others = others
        self._reported = load.running + load.transferring + load.queued
        self._others_ms = load.queued_ms * others.tokens / load.queued_tokens if load.queued_tokens else 0.0
        self._placed, self._placed_ms = 0, 0.0
        self._count()
        self._add_up()

    def add(self, room: int, tokens: int, time: PromptTime = NO_TIME) -> None:
        """Count a request that was placed on the node, whose prompt takes `time` there."""
        left = self._left[room] = _Left(tokens, time)
        self.tokens += tokens
        self._placed += 1
        if tokens:
            self._computing[room] = left
            self._shared += time.shared
        if time is not NO_TIME:
            self._placed_ms += time.shared
            self._add_up()
        self._count()

    def computed(self, room: int) -> None:
        """Note that the node has computed the prompt of a room."""
        if room in self._computing:
            self._settle(room)
            self._left[room] = NOTHING_LEFT
            self._add_up()

    def remove(self, room: int) -> None:
        """Note that the node no longer holds anything of the room. May be called repeatedly."""
        if room in self._computing:
            self._settle(room)
            self._add_up()
        if self._left.pop(room, None) is not None:
            self._count()

    def _count(self) -> None:
        others = self._others
        expected = self.expected = len(self._left) + others.requests + others.routers * self._placed
        self.requests = expected if expected > self._reported else self._reported

    def _add_up(self) -> None:
        oldest = next(iter(self._computing.values()), NOTHING_LEFT).time
        ms = self._others_ms + self._others.routers * self._placed_ms
        self.ms = self._shared + (oldest.alone - oldest.shared) + ms

    def _settle(self, room: int) -> None:
        left = self._computing.pop(room)
        self.tokens -= left.tokens
        # Without any prompt, rounding errors of the sum end.
        self._shared = max(self._shared - left.time.shared, 0.0) if self._computing else 0.0
