"""Remembers on which nodes the last request of a conversation was placed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Sessions that are remembered; beyond it the one without requests for the longest time is forgotten.
MAX_SESSIONS = 65_536


class _Entry(NamedTuple):
    nodes: tuple[str, str]  # incarnations
    until: float  # monotonic seconds


class SessionNodes:
    """The nodes of each session. Used on the event loop only."""

    def __init__(self, ttl: float, clock: Callable[[], float]) -> None:
        """`ttl`: seconds after its last request for which a session is remembered."""
        self._ttl = ttl
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def nodes(self, session: bytes) -> tuple[str, ...]:
        """Return the incarnations of the session's prefill and decode node; () if it has none."""
        entry = self._entries.get(session) if session else None
        return entry.nodes if entry is not None and entry.until > self._clock() else ()

    def placed(self, session: bytes, prefill: str, decode: str) -> None:
        """Note where a request of the session was placed."""
        if not session:
            return
        now = self._clock()
        self._entries[session] = _Entry((prefill, decode), now + self._ttl)
        self._entries.move_to_end(session)
        # All sessions are remembered for the same time, so the entries are in the order in which they expire.
        while len(self._entries) > MAX_SESSIONS or next(iter(self._entries.values())).until <= now:
            self._entries.popitem(last=False)
