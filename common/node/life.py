"""The life cycle of a node of either role: messages from the router, draining, sweeping, the end.

up ──SIGTERM──> draining ──nothing left, or out of time──> stopping ──> Goodbye
 └──────────────────────────── Rejected ───────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from common.messages.identity import NodeCounters, NodeLoad, NodeState
from common.messages.node_inbox import Abort, FlushCache, PeerLost, Rejected
from common.messages.router_inbox import Goodbye
from common.node.router_link import RouterLink
from common.observability.logs import Log

SWEEP_INTERVAL = 0.25  # seconds between checks of deadlines

Work = TypeVar("Work")
Work_contra = TypeVar("Work_contra", contravariant=True)


class Duties(Protocol[Work_contra]):
    """The handlers that a role implements for these events. All methods are called by the thread of the main loop."""

    def take(self, work: Work_contra, now: float) -> None:
        """Take a request, which may have to be refused."""
        ...

    def abort(self, room: int, reason: str) -> None:
        """Abort the room, which may be unknown, since an abort and a finish may cross."""
        ...

    def peer_lost(self, incarnation: str) -> None:
        """Handle the loss of a node of the other role."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache, apart from the pages that requests use."""
        ...

    def router_lost(self) -> None:
        """Drop all requests: the router that sent them has ended, or has given this node up."""
        ...

    def sweep(self, now: float) -> None:
        """End requests that are past their deadline."""
        ...


class NodeLife(Generic[Work]):
    """Tracks a node's state and dispatches messages to duties. Only `drain` may be called from a signal handler."""

    def __init__(
        self,
        incarnation: str,
        link: RouterLink[Any],
        work: type[Work],
        drain_timeout: float,
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        self._incarnation = incarnation
        self._link = link
        self._work = work
        self._drain_timeout = drain_timeout
        self._log = log
        self._clock = clock
        self._state: NodeState = "up"
        self._drain_until = float("inf")
        self._swept = 0.0
        self._stopping = False

    @property
    def takes_requests(self) -> bool:
        return self._state == "up"

    def stopping(self) -> bool:
        """Return whether the loop must end."""
        return self._stopping

    def drain(self) -> None:
        """Take no new requests, finish the present ones, then stop."""
        if self._state != "draining":
            self._state = "draining"
            self._drain_until = self._clock() + self._drain_timeout

    def receive(self, duties: Duties[Work], now: float) -> None:
        """Process the messages from the router, control messages first."""
        for message in self._link.drain():
            if isinstance(message, self._work):
                duties.take(message, now)
            elif isinstance(message, Abort):
                duties.abort(message.room, message.reason)
            elif isinstance(message, PeerLost):
                duties.peer_lost(message.incarnation)
            elif isinstance(message, FlushCache):
                duties.flush_cache()
            elif isinstance(message, Rejected):
                self._log.error("this node and the router cannot work together", reason=message.reason)
                self._stopping = True

    def look_after(self, duties: Duties[Work], requests: int, now: float) -> None:
        """Handle events of time, once per turn and after `receive`: a lost router, deadlines."""
        if self._link.lost():
            self._log.warning("no answer from the router: dropping its requests", requests=requests)
            duties.router_lost()
        if now - self._swept > SWEEP_INTERVAL:
            self._swept = now
            duties.sweep(now)

    def publish(self, load: NodeLoad, counters: NodeCounters) -> None:
        """Publish the state for the next heartbeat, once per turn."""
        self._link.publish(self._state, load, counters)

    def end_turn(self, requests: int, now: float) -> None:
        """Stop a draining node that has no requests or no time left."""
        if self._state == "draining" and (not requests or now > self._drain_until):
            self._stopping = True

    def run(self, loop: Callable[[], None]) -> None:
        """Run `loop`, which returns once `stopping`, then tell the router that this incarnation has ended."""
        loop()
        self._link.send(Goodbye(incarnation=self._incarnation))
