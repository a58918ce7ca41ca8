"""Runs Python's full garbage collections in a node's main loop right after a launch, or in an idle turn.

A full collection visits what all live requests and cached prefixes have made, some 3 ms with 50 requests. Python would
begin it anywhere, also between the mark of a step and the launch that follows, and the device would wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, Protocol

# A threshold with which Python never starts a full collection by itself.
NEVER: Final = 1 << 30
PENDING = 10  # collections of the middle generation since the last full one: Python's own threshold
INTERVAL = 2.0  # seconds


class TurnCollections(Protocol):
    """Called at the end of each turn of a main loop, when the device has work or there is none."""

    def end_turn(self, now: float) -> None: ...


class NoCollections:
    """Leaves all collections to Python."""

    def end_turn(self, now: float) -> None:
        pass


class FullCollections:
    """Runs the full collections of a serving process, in pauses of its loop: Python starts none by itself any more."""

    def __init__(
        self,
        pending: Callable[[], int] = lambda: gc.get_count()[2],
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        """`pending` returns the number of collections of the middle generation since the last full one."""
        self._pending = pending
        self._collect = collect
        self._begun = False
        self._looked = 0.0

    def end_turn(self, now: float) -> None:
        if not self._begun:  # the start of a process leaves its collections to Python
            self._begun = True
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)
        if now - self._looked >= INTERVAL and self._pending() >= PENDING:
            self._looked = now
            self._collect()
