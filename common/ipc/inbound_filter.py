"""Filters what a listening socket receives: frames that their key allows, from peers that are not cut off.

libzmq cannot close one connection of a ROUTER socket. Frames of a peer that was cut off are therefore read and
dropped, a bounded number per turn and fairly between connections; with keys, its key is also refused for a while.
(Taking its route by ROUTER_HANDOVER would stop the reading, but aborts libzmq 4.3.5 when such a peer then
disconnects: assertion !_io_error in stream_engine_base.cpp.)
"""

from __future__ import annotations

import zmq

from common.ipc.bad_frames import BadFrames, peer_of
from common.ipc.identity_check import IdentityCheck
from common.ipc.routes import Routes, peer_name
from common.observability.bounded_log import BoundedLog
from common.observability.logs import Log

# First byte of the routing ids that libzmq generates: for a peer that has chosen none, and for an earlier connection
# of a peer that has reconnected. Frames left in such a connection are dropped here; the peer's session sends them
# again.
MADE_UP = b"\0"
# As integers: pyzmq converts its enums at each call.
NOBLOCK, EVENTS, POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)


class InboundFilter:
    """Reads one ROUTER socket, which is not bound yet. Single-threaded, as the socket is."""

    def __init__(self, router: zmq.Socket[bytes], check: IdentityCheck | None) -> None:
        """`check` belongs to a socket with keys; None for a plain socket."""
        self._router = router
        self._check = check
        self._newly_cut_off: list[str] = []
        # Routing id and peer of the frame before, on a plain socket.
        self._latest: tuple[bytes | None, bytes] = None, b""
        self.routes = Routes()
        self.bad = BadFrames(BoundedLog(Log("links"), "refused a frame"))

    def receive(self, most: int, readable: bool = False) -> list[list[bytes]]:
        """Return at most `most` messages as [peer, part ...]; one that is not allowed keeps only its peer.

        `readable`: there is probably one. To be wrong costs an exception.
        """
        router, check = self._router, self._check
        received: list[list[bytes]] = []
        # Reading without a message raises an exception, which costs three times as much as asking the socket.
        while len(received) < most and (readable or int(router.getsockopt(EVENTS)) & POLLIN):
            readable = False
            # A frame that is not copied knows whether more follow: `recv_multipart` asks the socket, at twice the cost
            # of the whole message. Only such a frame says whose key its connection has proved.
            try:
                frame = first = router.recv(NOBLOCK, copy=False)
            except zmq.Again:
                break
            parts = [first.bytes]
            while frame.more:
                frame = router.recv(NOBLOCK, copy=False)
                parts.append(frame.bytes)
            received.append(self._named(parts) if check is None else self._allowed(first, parts[1:], check))
        if self.bad.cut_off:
            received = [self._not_cut_off(parts) for parts in received]
        return received

    def refuse(self, peer: bytes, reason: str) -> None:
        """Count a bad frame of `peer`, log it at a bounded rate, and cut the peer off after too many."""
        self._count(self._culprit(peer), reason)

    def take_cut_off(self) -> list[str]:
        """Return the peers cut off since the last call, as in BadFrames."""
        taken, self._newly_cut_off = self._newly_cut_off, []
        return taken

    def _named(self, parts: list[bytes]) -> list[bytes]:
        routing_id = parts[0]
        if routing_id == self._latest[0]:
            # Its route is the newest already.
            parts[0] = self._latest[1]
            return parts
        if routing_id.startswith(MADE_UP):
            return parts[:1]
        peer = parts[0] = peer_name(routing_id)
        self.routes.heard(peer, routing_id)
        self._latest = routing_id, peer
        return parts

    def _allowed(self, identity: zmq.Frame, parts: list[bytes], check: IdentityCheck) -> list[bytes]:
        routing_id = identity.bytes
        if routing_id.startswith(MADE_UP):
            return [routing_id]
        peer = peer_name(routing_id)
        misuse = check.misuse(peer, identity)
        if misuse is None:
            self.routes.heard(peer, routing_id)
            return [peer, *parts]
        self._count(*misuse)
        return [peer]

    def _not_cut_off(self, parts: list[bytes]) -> list[bytes]:
        return parts[:1] if self.bad.is_cut_off(self._culprit(parts[0])) else parts

    def _culprit(self, peer: bytes) -> str:
        return peer_of(peer) if self._check is None else self._check.culprit(peer)

    def _count(self, culprit: str, reason: str) -> None:
        if self.bad.count(culprit, reason):
            self._newly_cut_off.append(culprit)
            if self._check is not None:
                self._check.ban(culprit.partition("/")[0])
