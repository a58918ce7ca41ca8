"""Sends the messages to nodes of all requests in one turn of the event loop together, at the end of the turn.

Messages for one node share frames, because a frame costs much more than a message: it is numbered, digested and kept
until it is acknowledged, and ZMQ's thread has to be woken if it sleeps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from router.nodes.registry import Node

RETRY_SECONDS = 0.25  # until a message is sent again to a node that could not be reached
# From routing id and message to whether the node can be reached.
Send = Callable[[str, msgspec.Struct], bool]
# From routing id and messages to how many of them were sent: fewer if the node cannot be reached.
SendAll = Callable[[str, Sequence[msgspec.Struct]], int]
Message = tuple[str, Node, msgspec.Struct]  # (routing id, node, message)


class Parcel(msgspec.Struct, eq=False):
    """The messages of one placement, in sending order. They leave up to the first that cannot be sent."""

    messages: Sequence[Message]
    # Called with the node that cannot be reached, or with the exception of a message that cannot be encoded.
    unsent: Callable[[Node | Exception], None]
    sent: Callable[[], None] | None = None  # called once all messages have been sent
    waits: bool = True  # for the end of the turn
    failed: bool = False

    def cancel(self) -> bool:
        """Send none of the messages. Returns False if they have been sent already."""
        waited, self.waits = self.waits, False
        return waited

    def fail(self, reason: Node | Exception) -> None:
        self.failed = True
        self.unsent(reason)


class Outbox:
    """The first messages of all parcels leave first, then the second ones: those of one parcel stay in order."""

    def __init__(self, send_all: SendAll) -> None:
        self._send_all = send_all
        self._waiting: list[Parcel] = []

    def put(self, parcel: Parcel) -> None:
        """Send a parcel at the end of the turn, unless it is cancelled before."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(parcel)

    def post(self, node: Node, message: msgspec.Struct) -> None:
        """Send one message. While the node cannot be reached, try again until the node is lost.

        Without that, what a client no longer wants would run to its end after a connection that broke for a moment.
        """
        self.put(Parcel([(node.routing_id, node, message)], partial(self._post_later, node, message)))

    def _post_later(self, node: Node, message: msgspec.Struct, reason: Node | Exception) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(reason, Exception):
            # Nobody waits for this message: tell the event loop.
            loop.call_exception_handler(
                {"message": "a message to a node could not be sent", "exception": reason}
            )
        elif node.lost_by is None:
            loop.call_later(RETRY_SECONDS, self._post_again, node, message)

    def _post_again(self, node: Node, message: msgspec.Struct) -> None:
        if node.lost_by is None:
            self.post(node, message)

    def _flush(self) -> None:
        parcels = [parcel for parcel in self._waiting if parcel.waits]
        self._waiting = []
        index = 0
        while parcels:
            by_peer: dict[str, list[Parcel]] = {}
            for parcel in parcels:
                parcel.waits = False
                by_peer.setdefault(parcel.messages[index][0], []).append(parcel)
            for peer, sharing in by_peer.items():
                self._deliver(peer, sharing, index)
            index += 1
            before, parcels = parcels, []
            for parcel in before:
                if parcel.failed:
                    continue
                if index < len(parcel.messages):
                    parcels.append(parcel)
                elif parcel.sent is not None:
                    parcel.sent()

    def _deliver(self, peer: str, parcels: Sequence[Parcel], index: int) -> None:
        try:
            sent = self._send_all(peer, [parcel.messages[index][2] for parcel in parcels])
        except Exception as error:
            # One message that cannot be encoded must not hold up those of other requests.
            if len(parcels) == 1:
                parcels[0].fail(error)
            else:
                for parcel in parcels:
                    self._deliver(peer, [parcel], index)
            return
        for parcel in parcels[sent:]:
            parcel.fail(parcel.messages[index][1])
