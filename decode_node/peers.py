"""Connections to prefill nodes, one Dealer per incarnation, opened at the first reservation that names it."""

from __future__ import annotations

import zmq

from common.errors import ConfigError, Overloaded, Unavailable
from common.ipc import Dealer, LinkSecurity
from common.messages.identity import NodeRef
from kv_transfer.receiver import Receiver

MAX_PEERS = 256


class PeerConnections:
    """Owns the sockets; the receiver owns the protocol."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: str,
        receiver: Receiver,
        poller: zmq.Poller,
        security: LinkSecurity | None = None,
    ) -> None:
        self._context = context
        self._identity = incarnation.encode()
        self._receiver = receiver
        self._poller = poller
        self._security = security
        self._dealers: dict[str, Dealer] = {}  # prefill incarnation -> socket

    def ensure(self, peer: NodeRef) -> None:
        """Connect and say Hello unless that has happened."""
        if peer.incarnation in self._dealers:
            return
        if len(self._dealers) >= MAX_PEERS:
            raise Overloaded(f"this decode node talks to {MAX_PEERS} prefill nodes already")
        try:
            dealer = Dealer(self._context, peer.peer_address, self._identity, peer.name, self._security)
        except ConfigError as error:
            raise Unavailable(f"prefill node {peer.name} cannot be connected to: {error}") from error
        self._dealers[peer.incarnation] = dealer
        self._poller.register(dealer.socket, zmq.POLLIN)
        self._receiver.connect(peer.incarnation, dealer.send)

    def pump(self) -> None:
        """Hand everything that has arrived to the receiver."""
        for incarnation, dealer in self._dealers.items():
            for frame in dealer.drain():
                self._receiver.handle(incarnation, frame)

    def lost(self, incarnation: str) -> None:
        self._receiver.peer_lost(incarnation)
        dealer = self._dealers.pop(incarnation, None)
        if dealer is not None:
            self._poller.unregister(dealer.socket)
            dealer.close()

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
