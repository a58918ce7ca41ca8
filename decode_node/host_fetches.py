"""Carries out the copies of a plan to and from host memory, and tracks which have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from common.errors import InternalError
from common.kv_cache.host_plan import Comparison, Damage, RankStore
from decode_node.step_plan import Moves

FETCH_SECONDS = 60.0  # after which a copy from host memory that has not ended counts as a fault of the device


class HostEnds(Protocol):
    """The interface of host memory for decisions about it."""

    def unfinished(self) -> Collection[int]:
        """Return the keys of applied stores whose copies have not ended. Does not wait."""
        ...

    def fetched(self) -> Mapping[int, Damage]:
        """Return the applied fetches that have ended, by key and each once, and what differed. Does not wait."""
        ...


class HostMoves(Protocol):
    """The interface of host memory for the worker of a rank."""

    def apply(self, moves: Moves) -> None:
        """Start copies: to host memory after all work launched so far, from there at once."""
        ...


class AppliedFetches(HostMoves, HostEnds, Protocol):
    """Host memory of all ranks, as rank 0 sees it; `HostFetches` is that of a node with one rank."""


class _RunningFetch(NamedTuple):
    """A fetch that has not ended."""

    comparison: Comparison
    started: float


class HostFetches:
    """Implements `AppliedFetches` for one rank."""

    def __init__(self, memory: RankStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._clock = clock
        self._running: dict[int, _RunningFetch] = {}

    def apply(self, moves: Moves) -> None:
        self._memory.store(moves.stores)
        for each in moves.fetches:
            self._running[each.key] = _RunningFetch(self._memory.load([each.copy]), self._clock())

    def unfinished(self) -> Collection[int]:
        return self._memory.unfinished()

    def fetched(self) -> Mapping[int, Damage]:
        """Return the fetches that have ended.

        Raises InternalError if one takes longer than FETCH_SECONDS: its request would never go on.
        """
        ended = [key for key, each in self._running.items() if each.comparison.ready()]
        found = {key: self._running.pop(key).comparison.read() for key in ended}
        now = self._clock()
        for each in self._running.values():
            if now - each.started > FETCH_SECONDS:
                raise InternalError(
                    f"KV pages have not been copied from host memory within {FETCH_SECONDS:.0f} s: the device does "
                    "not make progress; restart this decode node"
                )
        return found
