"""A bounded map with expiring entries, for state that a peer can make this process keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

EXPIRE_INTERVAL = 0.05  # seconds between two looks at entries that expire after seconds
K = TypeVar("K")
V = TypeVar("V")


class ExpiringMap(Generic[K, V]):
    """Map of at most `capacity` entries, oldest first; `expire` removes those older than `ttl` seconds."""

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float]) -> None:
        self._entries: dict[K, tuple[float, V]] = {}
        self._capacity = capacity
        self._ttl = ttl
        self._clock = clock

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry else None

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        return entry[1] if entry else None

    def put(self, key: K, value: V) -> list[V]:
        """Insert or replace the entry and return the values that were evicted to make room."""
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._ttl, value)
        evicted: list[V] = []
        while len(self._entries) > self._capacity:
            evicted.append(self._entries.pop(next(iter(self._entries)))[1])
        return evicted

    def expire(self) -> list[V]:
        """Remove the entries that are older than `ttl` and return their values."""
        now = self._clock()
        gone: list[V] = []
        while self._entries:
            key, (until, value) = next(iter(self._entries.items()))
            if until > now:
                break
            del self._entries[key]
            gone.append(value)
        return gone

    def remove_where(self, doomed: Callable[[V], bool]) -> list[V]:
        """Remove the entries whose value is `doomed` and return their values."""
        keys = [key for key, (_, value) in self._entries.items() if doomed(value)]
        return [self._entries.pop(key)[1] for key in keys]
