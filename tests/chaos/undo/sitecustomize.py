"""Removes one fix from the product, in every process that is started with this directory on PYTHONPATH.

`tests/chaos/run --undo R1|R2` uses it to show that the checker would find the defect. TANDEM_CHAOS_UNDO selects it:

R1  Connections between nodes have only the routing id of their node, without the incarnation and the dial for which
    they were made, and no sessions: a connection to a node's earlier incarnation takes over the route of its
    successor.
R2  A lost frame is never sent again, and later frames are delivered. (The harness also restores the transfer timeouts
    of that time, which were minutes long.)
"""

from __future__ import annotations

import os
import sys
from typing import Any


def undo_r1() -> None:
    from common.ipc import channel, dealer
    from common.messages import identity

    routing_id, make_dealer, dial_id = identity.routing_id, dealer.Dealer.__init__, dealer.dial_id
    send, post = dealer.Dealer.send, channel.RouterSocket.post
    of_nodes: set[int] = set()  # sockets between nodes, by id: they live as long as the process

    def caller() -> str:
        return str(sys._getframe(2).f_globals["__name__"])

    def without_incarnation(name: str, incarnation: str, *link: str) -> str:
        return routing_id(name, incarnation, *(() if caller() == "decode_node.peers" else link))

    def without_session(self: dealer.Dealer, *args: Any, **kwargs: Any) -> None:
        between_nodes = caller() == "decode_node.peers"
        if between_nodes:
            kwargs["opens"] = False
        make_dealer(self, *args, **kwargs)
        if between_nodes:
            self._silence = None
            of_nodes.add(id(self))

    def plain_id(peer: bytes) -> bytes:
        return peer if peer.count(b"/") == 1 else dial_id(peer)

    def send_once(self: dealer.Dealer, payload: bytes) -> bool:
        return self._send((payload,)) if id(self) in of_nodes else send(self, payload)

    def post_once(self: channel.RouterSocket, peer: bytes, payload: bytes) -> bool:
        return self.datagram(peer, payload) if "prefill_node" in sys.argv[0] else post(self, peer, payload)

    identity.routing_id = without_incarnation
    dealer.dial_id = plain_id
    dealer.Dealer.__init__ = without_session  # type: ignore[method-assign]
    dealer.Dealer.send = send_once  # type: ignore[method-assign]
    channel.RouterSocket.post = post_once  # type: ignore[method-assign]


def undo_r2() -> None:
    from common.ipc.session import FrameKind, Header, Session, read_header

    due, receive = Session.due, Session.receive

    def never_again(self: Session, now: float) -> list[tuple[bytes, bytes]]:
        self._resend = False
        frames = due(self, now)
        return [each for each in frames if read_header(*each).kind is not FrameKind.PROBE]

    def past_a_gap(self: Session, header: Header, payload: bytes, now: float) -> bytes | None:
        if header.kind in (FrameKind.DATA, FrameKind.PACK):
            self._received = max(self._received, header.number - 1)
        return receive(self, header, payload, now)

    Session.due = never_again  # type: ignore[method-assign]
    Session.receive = past_a_gap  # type: ignore[method-assign]


if "TANDEM_CHAOS_UNDO" in os.environ:
    {"R1": undo_r1, "R2": undo_r2}[os.environ["TANDEM_CHAOS_UNDO"]]()
