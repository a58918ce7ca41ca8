"""Measures the speed of a decode node while an answer is in progress, so that a slow node is found early."""

from __future__ import annotations

from router.dispatch.attempt import Attempt
from router.nodes.health import NodeHealth

PACE_SECONDS = 1.0  # shortest time between two measurements of one attempt


class DecodePace:
    """Measures the decode node of one attempt."""

    def __init__(self, attempt: Attempt, health: NodeHealth) -> None:
        self._attempt = attempt
        self._health = health
        self._since: float | None = None  # when the last measurement ended
        self._offset = 0
        self.due = 0.0  # when `measure` has something to do again

    def measure(self, now: float) -> None:
        """Record progress when tokens arrive, from `due` on. The final tokens are measured by `Dispatcher.decoded`."""
        attempt = self._attempt
        if attempt.error is not None or attempt.finish_reason is not None or attempt.next_offset < 2:
            return
        if self._since is not None:
            self._health.decoded(attempt.decode, now - self._since, attempt.next_offset - self._offset)
        self._since, self._offset, self.due = now, attempt.next_offset, now + PACE_SECONDS
