"""Passes the tokens of one attempt to the reader of the answer, and records what has been passed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.messages.generation import OutputToken
from common.observability.event_log import EventLog
from router.dispatch.attempt import Attempt
from router.dispatch.in_flight import InFlight
from router.dispatch.isolation import Trial
from router.dispatch.poison_watch import PoisonWatch
from router.nodes.health import NodeHealth

PACE_SECONDS = 1.0  # shortest time between two measurements of one attempt


class DecodePace:
    """Measures the speed of a decode node while an answer is in progress, so that a slow node is found early."""

    def __init__(self, attempt: Attempt, health: NodeHealth) -> None:
        self._attempt = attempt
        self._health = health
        self._since: float | None = None  # when the last measurement ended
        self._offset = 0
        self.due = 0.0  # when `measure` has something to do again

    def measure(self, now: float) -> None:
        """Record progress when tokens arrive, from `due` on. `PlacementFeedback.decoded` measures the final ones."""
        attempt = self._attempt
        if attempt.error is not None or attempt.finish_reason is not None or attempt.next_offset < 2:
            return
        if self._since is not None:
            self._health.decoded(attempt.decode, now - self._since, attempt.next_offset - self._offset)
        self._since, self._offset, self.due = now, attempt.next_offset, now + PACE_SECONDS


class Delivery:
    """Passes each token of the attempt to the reader once: yielded by the dispatcher, or through `take_now`."""

    def __init__(
        self,
        flight: InFlight,
        attempt: Attempt,
        trial: Trial,
        health: NodeHealth,
        poison: PoisonWatch,
        events: EventLog,
    ) -> None:
        self._flight = flight
        self._attempt = attempt
        self._trial = trial
        self._poison = poison
        self._pace = DecodePace(attempt, health)
        self._events = events

    def take_now(self, tokens: Sequence[OutputToken]) -> bool:
        """Give the reader tokens of a run that continues what it has. Return False if its task has to take them."""
        if not self._flight.take_now(tokens):
            return False
        self._attempt.next_offset += len(tokens)
        self.record(tokens)
        return True

    def record(self, tokens: Sequence[OutputToken]) -> None:
        """Record tokens that the reader gets now: an attempt that follows continues after them."""
        flight, now = self._flight, time.monotonic()
        if not flight.delivered:
            flight.timeline.mark("first_token", now)
            flight.cached_tokens = self._attempt.cached_tokens
        if self._events.records:
            self._events.add_tokens(
                "delivered", len(flight.delivered), tokens, request=flight.request.request_id
            )
        for token in tokens:
            flight.delivered.append(token.id)
        if now >= self._pace.due:
            self._pace.measure(now)
        if flight.suspect:
            self._poison.progressed(flight, self._attempt.answer_tokens, self._trial)
