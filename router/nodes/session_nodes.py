"""Remembers on which nodes the last request of a conversation was placed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Sessions that are remembered; beyond it the one without requests for the longest time is forgotten.
MAX_SESSIONS = 65_536


class _Seat(NamedTuple):
    nodes: tuple[str, str]  # incarnations
    until: float  # monotonic seconds


class SessionNodes:
    """The nodes of each session. Used on the event loop only."""

    def __init__(self, ttl: float, clock: Callable[[], float]) -> None:
        """`ttl`: seconds after its last request for which a session is remembered."""
        self._ttl = ttl
        self._clock = clock
        self._seats: OrderedDict[bytes, _Seat] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seats)

    def nodes(self, session: bytes) -> tuple[str, ...]:
        """Return the incarnations of the session's prefill and decode node; () if it has none."""
        seat = self._seats.get(session) if session else None
        return seat.nodes if seat is not None and seat.until > self._clock() else ()

    def placed(self, session: bytes, prefill: str, decode: str) -> None:
        """Note where a request of the session was placed."""
        if not session:
            return
        now = self._clock()
        self._seats[session] = _Seat((prefill, decode), now + self._ttl)
        self._seats.move_to_end(session)
        # The order is that of the ends: all sessions are remembered for the same time.
        while len(self._seats) > MAX_SESSIONS or next(iter(self._seats.values())).until <= now:
            self._seats.popitem(last=False)
