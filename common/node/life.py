"""The life cycle of a node of either role: messages from routers, draining, sweeping, the end.

up ──SIGTERM──> draining ──nothing left, or out of time──> stopping ──> Goodbye
 └──────────────── Rejected, unless others serve it ───────────────┘

While it does not end, the half of a movable node changes between up, draining and standby (role_switch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

from common.errors import NodeRefused
from common.messages.identity import NodeCounters, NodeLoad
from common.messages.node_inbox import (
    Abort,
    ChangeRole,
    FlushCache,
    PeerDraining,
    PeerLost,
    Profile,
    Rejected,
)
from common.messages.router_inbox import ChangeAnswered, Goodbye
from common.node.lost_peers import LostPeers
from common.node.profiles import Profiler
from common.node.refusals import Refusals
from common.node.registration_log import RegistrationLog
from common.node.role_switch import FIXED_ROLE, CurrentRole
from common.node.router_link import RouterLink
from common.node.router_links import Held, RouterLinks
from common.node.to_router import ToRouter
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log
from common.observability.throughput import Activity, ThroughputLog, kv_usage, totals_of

SWEEP_INTERVAL = 0.25  # seconds between checks of deadlines


class OnPair(Protocol):
    """A request of a router, which this node shares with one of the other role."""

    @property
    def peer(self) -> str:
        """The incarnation of the other node."""
        ...


Work = TypeVar("Work", bound=OnPair)
Work_contra = TypeVar("Work_contra", contravariant=True)


class RoleHandlers(Protocol[Work_contra]):
    """The handlers that a role implements for these events. All methods are called by the thread of the main loop."""

    def take(self, work: Work_contra, router: ToRouter, now: float) -> None:
        """Take a request of `router`, which may have to be refused."""
        ...

    def abort(self, router: ToRouter, room: int, reason: str) -> None:
        """Abort the room of this router, which may be unknown, since an abort and a finish may cross."""
        ...

    def pair_lost(self, router: ToRouter, incarnation: str) -> None:
        """End the requests of this router that use a node of the other role, which other routers still use."""
        ...

    def peer_lost(self, incarnation: str) -> None:
        """Handle the loss of a node of the other role."""
        ...

    def peer_draining(self, router: ToRouter, incarnation: str) -> None:
        """Give back what this router can place elsewhere, as a node of the other role drains."""
        ...

    def flush_cache(self) -> None:
        """Empty the prefix cache, apart from the pages that requests use."""
        ...

    def router_lost(self, router: ToRouter, last: bool) -> int:
        """Drop the requests of a router that has ended, or has given this node up; return how many there were.

        `last`: no other router serves this node now.
        """
        ...

    def sweep(self, now: float) -> None:
        """End requests that are past their deadline."""
        ...


class NodeLife(Generic[Work]):
    """Tracks a node's state and dispatches messages to handlers. Only `drain` may be called from a signal handler."""

    def __init__(
        self,
        incarnation: str,
        links: RouterLinks[Any],
        work: type[Work],
        drain_timeout: float,
        log: Log,
        clock: Callable[[], float],
        profiler: Profiler,
        role: CurrentRole = FIXED_ROLE,
    ) -> None:
        self.incarnation = incarnation
        self._links = links
        self._work = work
        self._lost_peers = LostPeers()
        self._refusals = Refusals()
        self._refused = BoundedLog(log, "a router refuses this node, which goes on for the others")
        self._drain_timeout = drain_timeout
        self._log = log
        self._clock = clock
        self._profiler = profiler
        self._role = role
        self._state = role.state(0, clock())
        self._ending = False
        self._drain_until = float("inf")
        self._throughput = ThroughputLog(log, clock)
        self._registrations = RegistrationLog(log, clock())
        self._swept = 0.0
        self._stopping = False
        self._refusal = ""  # why routers refuse this node, once it ends because of that

    def takes(self, peer: str) -> bool:
        """Return whether the node takes a request now, which it shares with the node of this incarnation."""
        return not self._ending and self._role.takes(peer)

    def stopping(self) -> bool:
        """Return whether the loop must end."""
        return self._stopping

    def drain(self) -> None:
        """Take no new requests, finish the present ones, then stop."""
        if not self._ending:
            self._drain_until = self._clock() + self._drain_timeout
            self._ending = True

    def receive(self, handlers: RoleHandlers[Work], now: float) -> None:
        """Process the messages from routers, control messages of each first."""
        for router, message in self._links.drain():
            if isinstance(message, self._work):
                self._lost_peers.used(router, message.peer)
                handlers.take(message, router, now)
            elif isinstance(message, Abort):
                handlers.abort(router, message.room, message.reason)
            elif isinstance(message, PeerLost):
                if self._lost_peers.report(router, message.incarnation):
                    handlers.peer_lost(message.incarnation)
                else:
                    handlers.pair_lost(router, message.incarnation)
            elif isinstance(message, PeerDraining):
                handlers.peer_draining(router, message.incarnation)
            elif isinstance(message, FlushCache):
                handlers.flush_cache()
            elif isinstance(message, Profile):
                self._profiler.begin(message, router)
            elif isinstance(message, ChangeRole):
                refusal = "it is ending" if self._ending else self._role.change(message, now)
                router.send(ChangeAnswered(order=message.order, refusal=refusal))
            elif isinstance(message, Rejected):
                self._refuse(router, message.reason, now)

    def _refuse(self, router: RouterLink[Any], reason: str, now: float) -> None:
        if self._refusals.final(router, self._links.registered, self._links.count, now):
            self._refusal, self._stopping = reason, True
        else:
            self._refused.warning(router.address, reason)

    def look_after(self, handlers: RoleHandlers[Work], now: float) -> None:
        """Handle events of time, once per turn and after `receive`: lost routers, deadlines."""
        for router in self._links.lost():
            registered = self._links.registered
            dropped = handlers.router_lost(router, not registered)
            self._log.warning(
                "no answer from a router: dropping its requests",
                router=router.address,
                requests=dropped,
                routers=len(registered),
            )
            for incarnation in self._lost_peers.forget_router(router):
                handlers.peer_lost(incarnation)
        if now - self._swept > SWEEP_INTERVAL:
            self._swept = now
            self._registrations.look(self._links.all, now)
            handlers.sweep(now)

    def publish(self, load: NodeLoad, counters: NodeCounters, held: Iterable[Held]) -> None:
        """Publish the state for the next heartbeat, once per turn. `held`: see RouterLinks."""
        self._links.publish("draining" if self._ending else self._state, load, counters, held)
        self._profiler.turn(counters.steps)
        self._throughput.log_if_due(
            self._clock(), lambda: Activity(totals_of(counters), load.running, load.queued, kv_usage(load))
        )

    def end_turn(self, requests: int, now: float, quarantined: int = 0) -> None:
        """Stop an ending node that has no requests or no time left.

        `quarantined`: requests that have ended, to whose pages a peer may still write. A node keeps its memory that
        long, but it may change its role, because the pages remain those of this half.
        """
        if not self._ending:
            self._state = self._role.state(requests, now)
        elif not (requests or quarantined):
            self._stopping = True
        elif now > self._drain_until and not self._stopping:
            self._stopping = True
            self._log.warning(
                "the drain timeout has passed: routers place the remaining requests again",
                requests=requests,
                quarantined=quarantined,
                seconds=self._drain_timeout,
            )

    def run(self, loop: Callable[[], None]) -> None:
        """Run `loop`, which returns once `stopping`, then tell the routers that this incarnation has ended.

        Raises NodeRefused if it has ended because no router takes it.
        """
        loop()
        self._profiler.close()
        self._links.send_all(Goodbye(incarnation=self.incarnation))
        if self._refusal:
            raise NodeRefused(self._refusal)
