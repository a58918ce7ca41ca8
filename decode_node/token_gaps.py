"""Measures the time between consecutive outputs of a request, once per step rather than once per token."""

from __future__ import annotations

from common.observability.histogram import TOKEN_SECONDS, Histogram
from decode_node.request import DecodeRequest


class TokenGaps:
    """Nearly all requests of a step took part in the one before: they share one gap, which is observed once."""

    def __init__(self) -> None:
        self.seconds = Histogram(TOKEN_SECONDS)
        self._previous = 0.0  # monotonic seconds when the previous step was read
        self._continuing = 0  # requests of this step that took part in the previous one

    def drawn(self, request: DecodeRequest, now: float) -> None:
        """Note that the step that was read at `now` drew tokens of this request."""
        if request.drawn_at == self._previous:
            self._continuing += 1
        else:
            self.seconds.observe(max(now - request.drawn_at, 0.0))
        request.drawn_at = now

    def step_ended(self, now: float) -> None:
        """Note that all requests of this step were given to `drawn`."""
        if self._continuing:
            self.seconds.observe(now - self._previous, self._continuing)
            self._continuing = 0
        self._previous = now
