"""Announces how long a node's main loop may be busy, so that the router can tell a long forward from a hang.

Before each launch the loop announces four times what earlier launches took for as much work, plus a floor. A launch
larger than any before is extrapolated from the largest one, and the first launches of a node get FIRST_SECONDS and
more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

FACTOR = 4.0  # safety factor of an estimate
FLOOR_SECONDS = 1.0  # minimum of every announcement
FIRST_SECONDS = 60.0  # minimum before anything was measured
SLOWEST_RATE = 8.0  # units per second assumed before anything was measured
MAX_SECONDS = 600.0  # maximum of one launch
KEPT = 0.9  # decay of the slowest launch of a size with each further one
CONTEXT_TOKENS = 8192  # context whose attention may double the time of a token

Plan_contra = TypeVar("Plan_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a launch in tokens. `at_most` includes an allowance for slower tokens: long context, images."""

    tokens: int
    at_most: float

    @classmethod
    def of(cls, tokens: int, token_contexts: int, extra: float = 0.0) -> Work:
        """Return the work of `tokens`; `token_contexts` is the number of preceding tokens, summed over all tokens."""
        return cls(tokens, tokens + token_contexts / CONTEXT_TOKENS + extra)


class LaunchTimes:
    """The slowest recent launches by size, from which the time that a launch may take is estimated.

    A launch is recorded under its tokens and looked up under `at_most`, so context and images only ever lengthen an
    estimate. Sizes are grouped by powers of two; the slowest launch of a group decays as further ones are recorded.
    """

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}  # tokens.bit_length() -> seconds

    def record(self, work: Work, seconds: float) -> None:
        group = work.tokens.bit_length()
        self._slowest[group] = max(seconds, KEPT * self._slowest.get(group, 0.0))

    def allowance(self, work: Work) -> float:
        """Return the seconds within which a launch of this size has certainly ended."""
        if not self._slowest:
            seconds = FIRST_SECONDS + work.at_most / SLOWEST_RATE
        else:
            seconds = FLOOR_SECONDS + FACTOR * self._estimate(work.at_most)
        return min(seconds, MAX_SECONDS)

    def _estimate(self, size: float) -> float:
        group = int(size).bit_length()
        as_large = [each for each in self._slowest if each >= group]
        if as_large:
            nearest = min(as_large)
            # The sizes of a group differ by up to a factor of two.
            return self._slowest[nearest] * (2 if nearest == group else 1)
        largest = max(self._slowest)
        return self._slowest[largest] * size / (1 << max(largest - 1, 0))


class Announcer(Protocol[Plan_contra]):
    """Receives the loop's launches, which end in the order in which they begin."""

    def begin(self, plan: Plan_contra) -> None:
        """Announce that `plan` is about to be launched."""
        ...

    def wait(self) -> None:
        """Announce that the loop is about to wait for the oldest launch."""
        ...

    def end(self) -> None:
        """Note that the results of the oldest launch have been read; after the last one nothing is announced."""
        ...


class Unannounced:
    """No-op announcer for loops without a watchdog."""

    def begin(self, plan: object) -> None:
        pass

    def wait(self) -> None:
        pass

    def end(self) -> None:
        pass


class OtherLaunches(Protocol):
    """The launches of another main loop on the same device: this loop's own ones wait until those have ended."""

    def note(self, seconds: float, /) -> float:
        """Note that what the calling thread has launched, or is about to, may take `seconds` from now on.

        Returns the seconds that the launches of the others may take.
        """
        ...


class NoOtherLaunches:
    """The launches of others on the device of a pure node."""

    def note(self, seconds: float) -> float:
        return 0.0


NO_OTHERS: Final = NoOtherLaunches()


Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class _Begun:
    work: Work
    at: float  # monotonic seconds
    allowance: float


class AnnouncedWork(Generic[Plan]):
    """Implements `Announcer`. The announced time covers all launches in flight, and those of `others`."""

    def __init__(
        self,
        announce: Callable[[float], None],
        work: Callable[[Plan], Work],
        clock: Callable[[], float] = time.monotonic,
        others: OtherLaunches = NO_OTHERS,
    ) -> None:
        """`announce(seconds)` says that the loop may be busy for this long from now on."""
        self._announce = announce
        self._work = work
        self._clock = clock
        self._others = others
        self._times = LaunchTimes()
        self._in_flight: deque[_Begun] = deque()

    def begin(self, plan: Plan) -> None:
        work = self._work(plan)
        self._in_flight.append(_Begun(work, self._clock(), self._times.allowance(work)))
        self.wait()

    def wait(self) -> None:
        allowed = 0.0
        for each in self._in_flight:
            allowed += each.allowance
        self._announce(allowed + self._others.note(allowed))

    def end(self) -> None:
        begun = self._in_flight.popleft()
        self._times.record(begun.work, self._clock() - begun.at)
        if not self._in_flight:
            self._others.note(0.0)
            self._announce(0.0)
