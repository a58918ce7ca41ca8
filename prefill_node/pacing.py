"""Delays the choice of the next forward until shortly before the running one ends, so that late prompts take part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from common.node.overlap import Completion

MARGIN = 0.001  # seconds that a launch may take longer than the slowest recent ones
KEPT = 0.9  # decay of the slowest launch with each further one


class PromptPacing(Protocol):
    """Decides when the next forward is chosen."""

    def hold(self, meanwhile: Callable[[], None]) -> None:
        """Wait until the next launch is due, then begin to prepare it. `meanwhile` is called until then."""
        ...

    def launched(self, completion: Completion, seconds: float) -> None:
        """Note a launch whose forward is predicted to take this long on the device."""
        ...


class LaunchPacing:
    """Predicts when the device runs out of work, and how long the host needs to launch more.

    A wrong prediction costs little: a forward that ends early ends the wait, and one that ends late only means that the
    next one was chosen earlier than necessary.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: Completion | None = None  # the latest launch's
        self._ends = -math.inf  # when it is predicted to end
        self._began = 0.0  # when the host began to prepare it
        self._slowest = 0.0  # seconds of a launch, preparation included

    def hold(self, meanwhile: Callable[[], None]) -> None:
        lead = self._slowest + MARGIN
        while self._running is not None and self._clock() < self._ends - lead:
            if self._running.ready():
                break
            meanwhile()
        self._began = self._clock()

    def launched(self, completion: Completion, seconds: float) -> None:
        now = self._clock()
        queued = self._running is not None and not self._running.ready()
        self._ends = seconds + (max(self._ends, now) if queued else now)
        self._running = completion
        self._slowest = max(now - self._began, KEPT * self._slowest)


class NoPacing:
    """The next forward is chosen at once: its predecessor is complete, or its time is not known."""

    def hold(self, meanwhile: Callable[[], None]) -> None:
        """No-op: the next launch is always due."""

    def launched(self, completion: Completion, seconds: float) -> None:
        """No-op: nothing is predicted."""


NO_PACING = NoPacing()
