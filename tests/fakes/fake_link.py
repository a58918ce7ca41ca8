"""A node's link to the router without a router: the methods of RouterLink, with real messages and codecs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from common.messages import router_inbox
from common.messages.identity import NodeCounters, NodeLoad, NodeState, OtherRouters
from common.messages.node_inbox import AnyNodeMessage
from common.messages.router_inbox import RouterMessage
from common.messages.wire import InboxCodec, encode
from common.node.router_link import HeartbeatContent, control_first
from common.node.router_links import RouterLinks


class FakeLink:
    """A fake RouterLink: `deliver` queues messages for the node, `taken` returns what it sent since the last call."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], codec: InboxCodec[AnyNodeMessage]) -> None:
        self.socket = context.socket(zmq.PULL)  # never readable; the node's poller needs it
        self.refused_messages = self.unsent_messages = 0
        self.router_lost = False  # the next return value of `lost`, used once
        self.state: NodeState = "loading"
        self.load = NodeLoad()
        self.counters = NodeCounters()
        self.others: OtherRouters | None = None
        self.announced: list[float] = []  # seconds
        self.registered = True
        self.hidden = False  # messages have arrived that the socket does not show
        self._codec = codec
        self.inbox: list[bytes] = []  # encoded messages that the node has not read
        self._said: list[bytes] = []

    def deliver(self, *messages: msgspec.Struct) -> None:
        self.inbox.extend(encode(message) for message in messages)

    def taken(self) -> list[RouterMessage]:
        said, self._said = self._said, []
        return [router_inbox.codec.decode(frame) for frame in said]

    # -- the interface of RouterLink

    address = "tcp://router:5600"

    def unregistered_because(self) -> str:
        return "it is a fake"

    def send(self, message: RouterMessage) -> None:
        self._said.append(encode(message))

    def drain(self) -> list[AnyNodeMessage]:
        inbox, self.inbox = self.inbox, []
        return control_first([self._codec.decode(frame) for frame in inbox])

    def lost(self) -> bool:
        lost, self.router_lost = self.router_lost, False
        self.registered = not lost
        return lost

    @property
    def readable(self) -> bool:
        return bool(self.inbox) and not self.hidden

    def publish(self, content: HeartbeatContent) -> None:
        self.state, self.load, self.counters = content.state, content.load, content.counters
        self.others = content.others.get(self)

    def close(self) -> None:
        self.socket.close(linger=0)


class FakeLinks(RouterLinks[Any]):
    """The links of a node to fake routers, which learn what the main loop announces."""

    def __init__(self, links: Sequence[FakeLink], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(links, clock)  # type: ignore[arg-type]
        self._fakes = links

    def announce(self, seconds: float) -> None:
        super().announce(seconds)
        for link in self._fakes:
            link.announced.append(seconds)
