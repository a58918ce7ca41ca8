"""Circuit breakers: a failed node or pair is left out for a while, then one trial request tests it.

    closed ──failures within the window──> open ──back-off over──> half-open ──success──> closed
                                            ^                          │
                                            └── failure: twice as long ┘

A breaker only advises: placement ignores it if nothing else is left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The number of failures that opens a breaker, and for how long it stays open."""

    failures: int  # that open it within `window`
    window: float  # seconds
    first_pause: float  # seconds that it stays open the first time; doubled each further time in a row
    longest_pause: float
    trial: float = 10.0  # seconds after which another trial request is let through


@dataclass(slots=True)
class BreakerState:
    failures: list[float] = field(default_factory=list)  # their times, while closed
    openings: int = 0  # in a row; 0 while closed
    open_until: float = 0.0
    trial_until: float = 0.0
    trial: int = 0  # room of the latest trial request


class Breakers(Generic[K]):
    """One breaker per key. Keys that never failed take no memory."""

    def __init__(self, limits: BreakerLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        # The keys that have failed lately. There are almost never any, and every request looks whether there are.
        self.states: dict[K, BreakerState] = {}

    def failed(self, key: K) -> None:
        """Count a failure. Failures while the breaker is open belong to older requests and change nothing."""
        now, limits = self._clock(), self._limits
        state = self.states.setdefault(key, BreakerState())
        if state.openings:
            if now >= state.open_until:
                self._open(state, now)
            return
        state.failures = [at for at in state.failures if now - at < limits.window]
        state.failures.append(now)
        if len(state.failures) >= limits.failures:
            self._open(state, now)

    def succeeded(self, key: K) -> None:
        """Close a half-open breaker, forget the failures of a closed one."""
        state = self.states.get(key)
        if state is not None and self._clock() >= state.open_until:
            del self.states[key]

    def placed(self, key: K, room: int) -> None:
        """Note that a request goes there. If the breaker is half-open, it is the trial, which no other may join."""
        state = self.states.get(key)
        if state is not None and state.openings:
            state.trial_until, state.trial = self._clock() + self._limits.trial, room

    def released(self, key: K, room: int) -> None:
        """Note that a request is over. If it was the trial, which then had no verdict, another one may try."""
        state = self.states.get(key)
        if state is not None and state.trial == room:
            state.trial_until = 0.0

    def state(self, key: K) -> str:
        """`closed`, `open` or `half-open`, for status pages."""
        state = self.states.get(key)
        if state is None or not state.openings:
            return "closed"
        return "open" if self._clock() < state.open_until else "half-open"

    def is_half_open(self, key: K) -> bool:
        return self.state(key) == "half-open"

    def blocked(self) -> set[K]:
        """Return the keys that no request should choose now."""
        if not self.states:
            return set()
        now = self._clock()
        return {
            key
            for key, state in self.states.items()
            if state.openings and now < max(state.open_until, state.trial_until)
        }

    def forget(self, gone: Callable[[K], bool]) -> None:
        for key in [key for key in self.states if gone(key)]:
            del self.states[key]

    def _open(self, state: BreakerState, now: float) -> None:
        pause = min(self._limits.first_pause * 2.0**state.openings, self._limits.longest_pause)
        state.openings = min(state.openings + 1, 30)
        state.open_until, state.trial_until = now + pause, 0.0
        state.failures.clear()
