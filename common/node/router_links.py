"""A node's links to all routers. Each router has its own link, requests and lease on them; the node has one state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import zmq

from common.discovery.places import RouterPlaces
from common.ipc import LinkSecurity
from common.messages.identity import NodeCounters, NodeLoad, NodeState, OtherRouters
from common.messages.node_inbox import AnyNodeMessage
from common.messages.router_inbox import Register, RouterMessage
from common.messages.wire import InboxCodec
from common.node.router_link import HeartbeatContent, RouterLink
from common.node.to_router import ToRouter
from common.node_plan import RouterPlan
from common.observability.logs import Log

M = TypeVar("M")  # the inbox of the node's role
Held = tuple[ToRouter, int]  # a request's router, and its prompt tokens that are not computed yet
COUNT_INTERVAL = 0.1  # seconds between two counts of the requests of each router
TEND_INTERVAL = 0.02  # seconds between two looks at a link on which nothing has arrived


class RouterLinks(Generic[M]):
    """Used by the node's main thread only; each link has a thread of its own for heartbeats."""

    def __init__(
        self,
        links: Sequence[RouterLink[M]],
        clock: Callable[[], float] = time.monotonic,
        close_source: Callable[[], None] = lambda: None,
    ) -> None:
        """`links`: at least one, each to another router. `close_source` ends the search for routers."""
        self._close_source = close_source
        self._links = tuple(links)
        self._clock = clock
        self._content = HeartbeatContent.now("loading", NodeLoad(), NodeCounters(), clock(), {})
        self._counted_at = self._tended_at = -1e9
        self._publish()

    @property
    def sockets(self) -> Iterator[zmq.Socket[bytes]]:
        """The sockets on which messages arrive."""
        return (link.socket for link in self._links)

    @property
    def all(self) -> Sequence[RouterLink[M]]:
        """The links to all routers, in a fixed order."""
        return self._links

    @property
    def count(self) -> int:
        """Number of routers, with those that do not answer."""
        return len(self._links)

    @property
    def registered(self) -> list[RouterLink[M]]:
        """The routers that serve this node now."""
        return [link for link in self._links if link.registered]

    @property
    def refused_messages(self) -> int:
        return sum(link.refused_messages for link in self._links)

    @property
    def unsent_messages(self) -> int:
        return sum(link.unsent_messages for link in self._links)

    def start(self) -> None:
        for link in self._links:
            link.start()

    def publish(
        self, state: NodeState, load: NodeLoad, counters: NodeCounters, held: Iterable[Held] = ()
    ) -> None:
        """Publish the content of the next heartbeats, and that the loop turned. Called once per turn of the main loop.

        `held`: the requests on this node, which are read only from time to time, and not with a single router.
        """
        now = self._clock()
        others = self._content.others
        if len(self._links) > 1 and now - self._counted_at >= COUNT_INTERVAL:
            self._counted_at, others = now, self._count(held)
        self._content = HeartbeatContent.now(state, load, counters, now, others)
        self._publish()

    def announce(self, seconds: float) -> None:
        """Announce that the main loop may not turn for `seconds`, because of work that it is about to begin."""
        self._content = self._content.busy(self._clock() + seconds)
        self._publish()

    def overdue(self) -> float:
        """Return the seconds by which the main loop exceeds the announced time; not positive while it has time left."""
        return self._clock() - self._content.busy_until

    def send_all(self, message: RouterMessage) -> None:
        """Send to every router without blocking."""
        for link in self._links:
            link.send(message)

    def drain(self) -> list[tuple[RouterLink[M], AnyNodeMessage | M]]:
        """Return the messages that have arrived, each with its router; those of one router as `RouterLink.drain`."""
        return [(link, message) for link in self._to_read() for message in link.drain()]

    def lost(self) -> list[RouterLink[M]]:
        """Return, once each, the routers that have ended or were replaced: their requests must be dropped."""
        return [link for link in self._links if link.lost()]

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._close_source()

    def _to_read(self) -> Sequence[RouterLink[M]]:
        """Return the links to read now: of several, those with messages, and from time to time all."""
        now = self._clock()
        if len(self._links) == 1 or now - self._tended_at >= TEND_INTERVAL:
            self._tended_at = now
            return self._links
        return [link for link in self._links if link.readable]

    def _publish(self) -> None:
        for link in self._links:
            link.publish(self._content)

    def _count(self, held: Iterable[Held]) -> dict[ToRouter, OtherRouters]:
        """Return for each router what the others have on this node."""
        requests: dict[ToRouter, int] = dict.fromkeys(self._links, 0)
        tokens: dict[ToRouter, int] = dict.fromkeys(self._links, 0)
        for router, left in held:
            requests[router] += 1
            tokens[router] += left
        registered = self.registered
        all_requests, all_tokens = sum(requests.values()), sum(tokens.values())
        return {
            link: OtherRouters(
                routers=sum(each is not link for each in registered),
                requests=all_requests - requests[link],
                tokens=all_tokens - tokens[link],
            )
            for link in self._links
        }


def router_links(
    context: zmq.Context[zmq.Socket[bytes]],
    plan: RouterPlan,
    places: RouterPlaces,
    register: Register,
    codec: InboxCodec[M],
    log: Log,
    security: LinkSecurity,
) -> RouterLinks[M]:
    """Return a link to the router at each place. They are not started."""
    links = [
        RouterLink(context, plan, each, register, codec, log, security=security) for each in places.hosts
    ]
    return RouterLinks(links, close_source=places.close)
