"""Tracks the attempts that nodes are working on, by room, and informs all objects that count open attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from common.messages.node_inbox import Abort
from common.observability.event_log import EventLog
from router.dispatch.attempt import Attempt
from router.dispatch.in_flight import InFlight
from router.dispatch.placement_feedback import PlacementFeedback
from router.metrics.timeline import Timelines
from router.nodes.health import NodeHealth
from router.nodes.outbox import Outbox


class OpenAttempts:
    """Both nodes of an attempt count it from `open` to `close`."""

    def __init__(
        self,
        timelines: Timelines,
        feedback: PlacementFeedback,
        health: NodeHealth,
        events: EventLog,
        outbox: Outbox,
    ) -> None:
        self.by_room: dict[int, Attempt] = {}
        self._flights: dict[int, InFlight] = {}  # room -> request of the attempt
        self._timelines = timelines
        self._feedback = feedback
        self._health = health
        self._events = events
        self._outbox = outbox

    def __iter__(self) -> Iterator[tuple[Attempt, InFlight]]:
        return ((attempt, self._flights[room]) for room, attempt in self.by_room.items())

    def flight(self, attempt: Attempt) -> InFlight:
        """Return the request of an open attempt."""
        return self._flights[attempt.room]

    def open(self, attempt: Attempt, flight: InFlight) -> None:
        """Register an attempt that is about to be sent to its nodes."""
        prefill, decode, timeline, room = attempt.prefill, attempt.decode, flight.timeline, attempt.room
        self.by_room[room] = flight.attempt = attempt
        self._flights[room] = flight
        attempt.deadline = asyncio.get_running_loop().call_at(flight.deadline, attempt.expire)
        now = time.monotonic()
        self._timelines.open(room, timeline, now, prefill.incarnation, decode.incarnation)
        self._feedback.opened(attempt, flight)
        timeline.mark("placed", now)
        if self._events.records:
            pair = {"prefill": prefill.incarnation, "decode": decode.incarnation}
            self._events.add("placed", room, request=timeline.request_id, tokens=flight.num_tokens, **pair)
        timeline.nodes.append({"prefill": prefill.name, "decode": decode.name})
        self._health.placed(prefill, decode, room)
        flight.request.share.placed(prefill.incarnation, decode.incarnation)

    def close(self, attempt: Attempt) -> None:
        """End an attempt, finished or not, and abort whatever a node still holds of it."""
        room = attempt.room
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        if attempt.hold is not None:
            attempt.hold.release()
        del self.by_room[room]
        flight = self._flights.pop(room)
        flight.attempt = None
        self._feedback.closed(attempt, flight)
        self._timelines.close(room)
        self._health.released(attempt.prefill, attempt.decode, room)
        finished = attempt.finish_reason is not None
        attempt.prefill.rooms.remove(room)
        attempt.decode.rooms.remove(room)
        # After the last token the prompt has been handed over, and the prefill node is about to report it.
        for node, over in (
            (attempt.prefill, attempt.prefill_over or finished),
            (attempt.decode, attempt.decode_over),
        ):
            if not over:
                reason = "finished" if finished else "the request ended at the router"
                self._outbox.post(node, Abort(room=room, reason=reason))
