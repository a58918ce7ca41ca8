"""Passes the tokens of one attempt to the reader of the answer, and records what has been passed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from common.messages.generation import OutputToken
from common.observability.event_log import EventLog
from router.dispatch.attempt import Attempt
from router.dispatch.decode_pace import DecodePace
from router.dispatch.in_flight import InFlight
from router.dispatch.isolation import Trial
from router.dispatch.poison_watch import PoisonWatch
from router.nodes.health import NodeHealth


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
