"""Reports the outcome of requests to health and history: their nodes, cached tokens, and the time of each part."""

from __future__ import annotations

from collections.abc import Mapping

from router.dispatch.attempt import Attempt
from router.dispatch.in_flight import InFlight
from router.metrics.placement_metrics import PlacementMetrics
from router.nodes.health import NodeHealth
from router.nodes.history import PlacementHistory

MIN_ANSWER = 8  # tokens: shorter answers say little about the steps of a node


class PlacementFeedback:
    """Reports each attempt to the health and history that placement uses, and counts it on both nodes."""

    def __init__(self, history: PlacementHistory, health: NodeHealth, metrics: PlacementMetrics) -> None:
        self._history = history
        self._health = health
        self._metrics = metrics
        metrics.known_blocks.set_function(lambda: history.blocks)
        metrics.followed_nodes.set_function(lambda: len(history.reported.following))

    def opened(self, attempt: Attempt, flight: InFlight) -> None:
        """Note that the attempt begins: both nodes count it."""
        prefill, tokens = attempt.prefill, flight.prompt.tokens
        attempt.expected = self._history.placed(flight.prompt, prefill, attempt.decode)
        time = prefill.prompt_time(tokens, attempt.expected.prefill)
        prefill.rooms.add(attempt.room, tokens, time)
        attempt.decode.rooms.add(attempt.room, 0)

    def transferred(self, attempt: Attempt, stages: Mapping[str, float], tokens: int) -> None:
        """Note that the pages of a prompt of `tokens` are handed over. `stages`: see Dispatcher.transferred."""
        prefill, decode, expected = attempt.prefill, attempt.decode, attempt.expected
        self._health.transferred(prefill, decode)
        self._health.node_served(prefill)
        end = stages.get("prefill_end", 0.0)
        self._health.prefilled(
            prefill, end - stages.get("prefill_start", 0.0), tokens - attempt.cached_tokens
        )
        if self._history.reads_prefixes:
            if expected.prefill:
                self._metrics.expected_cached.inc(expected.prefill)
            if attempt.cached_tokens:
                self._metrics.found_cached.inc(attempt.cached_tokens)
        if (sent := stages.get("last_page_sent")) is not None:
            seconds = max(sent - max(end, stages.get("slots", 0.0)), 0.0)
            moved = tokens - expected.decode
            self._history.transfers.measured(prefill.incarnation, decode.incarnation, seconds, moved)

    def decoded(
        self, attempt: Attempt, stages: Mapping[str, float], tokens: int, accept_length: float | None = None
    ) -> None:
        """Note that the decode node ended the request after `tokens` tokens. `stages`: seconds since reservation.

        `accept_length`: tokens per step that verified drafts; None without such steps.
        """
        self._health.node_served(attempt.decode)
        self._health.verified(attempt.prefill, attempt.decode)
        took = stages.get("finished", 0.0) - stages.get("first_decode", 0.0)
        # The prefill node draws the first token, and the measurement begins with the first decoded one.
        written = tokens - 2
        self._health.decoded(attempt.decode, took, written)
        if written >= MIN_ANSWER:
            step_ms = 1000 * took / written * max(accept_length or 1.0, 1.0)
            self._history.steps.measured(attempt.decode.rooms.expected, step_ms)

    def closed(self, attempt: Attempt, flight: InFlight) -> None:
        """Note that the attempt has ended."""
        if attempt.finish_reason is not None and self._history.reads_prefixes:
            self._history.answered(flight.prompt, flight.tokens, attempt.decode)
