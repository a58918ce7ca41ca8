"""The life of a node, the same for both roles: what every router may tell it, draining, sweeping, the end.

up ──Drain, SIGTERM──> draining ──nothing left, or out of time──> stopping ──> Goodbye
 └──────────────────────────── Rejected ───────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from common.messages.identity import NodeCounters, NodeLoad, NodeState
from common.messages.node_inbox import Abort, Drain, PeerLost, Rejected
from common.messages.router_inbox import Goodbye
from common.node.router_link import RouterLink
from common.observability.logs import Log

SWEEP_INTERVAL = 0.25  # seconds between looks at deadlines

Work = TypeVar("Work")
Work_contra = TypeVar("Work_contra", contravariant=True)


class Duties(Protocol[Work_contra]):
    """What a role does about it. All are called by the thread of the main loop."""

    def take(self, work: Work_contra, now: float) -> None:
        """A request, which may have to be refused."""
        ...

    def abort(self, room: int, reason: str) -> None:
        """The room may be unknown: abort and finish cross."""
        ...

    def peer_lost(self, incarnation: str) -> None:
        """A node of the other role is gone."""
        ...

    def router_lost(self) -> None:
        """Whoever asked for the requests here is gone, or has given this node up."""
        ...

    def sweep(self, now: float) -> None:
        """End what is past its deadline."""
        ...


class NodeLife(Generic[Work]):
    """Its state, and messages to duties. `drain` alone may be called from a signal handler."""

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
        """Whether the loop is to end."""
        return self._stopping

    def drain(self) -> None:
        """Take nothing new, finish what is here, stop."""
        if self._state != "draining":
            self._state = "draining"
            self._drain_until = self._clock() + self._drain_timeout

    def receive(self, duties: Duties[Work], now: float) -> None:
        """What has arrived from the router, control first."""
        for message in self._link.drain():
            if isinstance(message, self._work):
                duties.take(message, now)
            elif isinstance(message, Abort):
                duties.abort(message.room, message.reason)
            elif isinstance(message, PeerLost):
                duties.peer_lost(message.incarnation)
            elif isinstance(message, Drain):
                self.drain()
            elif isinstance(message, Rejected):
                self._log.error("the router refused this node", reason=message.reason)
                self._stopping = True

    def look_after(self, duties: Duties[Work], requests: int, now: float) -> None:
        """What time brings, once per turn and behind `receive`: a lost router, deadlines."""
        if self._link.lost():
            self._log.warning("no answer from the router: dropping its requests", requests=requests)
            duties.router_lost()
        if now - self._swept > SWEEP_INTERVAL:
            self._swept = now
            duties.sweep(now)

    def publish(self, load: NodeLoad, counters: NodeCounters) -> None:
        """For the next heartbeat, once per turn."""
        self._link.publish(self._state, load, counters)

    def end_turn(self, requests: int, now: float) -> None:
        """Stop where a draining node has nothing left, or no time."""
        if self._state == "draining" and (not requests or now > self._drain_until):
            self._stopping = True

    def run(self, loop: Callable[[], None]) -> None:
        """`loop` returns once `stopping`; then the router hears that this incarnation is gone."""
        loop()
        self._link.send(Goodbye(incarnation=self._incarnation))
