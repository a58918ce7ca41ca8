"""Tracks when the steps of a node begin on the device, as far as the host can tell without synchronizing."""

from __future__ import annotations

from collections import deque


class StepTimes:
    """Steps run one after another: one begins when it is launched, or when the step before it ends."""

    def __init__(self) -> None:
        self._launched: deque[float] = deque()  # launches of steps that have not ended, oldest first
        self._ended = 0.0  # end of the step before these

    def launched(self, now: float) -> None:
        """Note that a step has been launched."""
        self._launched.append(now)

    def ended(self, now: float) -> float:
        """Note that the oldest step has ended, and return when it began."""
        began = max(self._launched.popleft(), self._ended)
        self._ended = now
        return began
