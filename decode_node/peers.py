"""Connections to prefill nodes, one Dealer per incarnation, opened at the first reservation that names it."""

from __future__ import annotations

from collections.abc import Container

import zmq

from common.errors import ConfigError, Overloaded, TransferFailed
from common.ipc import Dealer, LinkSecurity
from common.messages.identity import NodeRef, routing_id
from kv_transfer.receiver import Receiver

MAX_PEERS = 256
SILENCE_SECONDS = 1.5  # of a link that is broken without a word: with LINK_SECONDS, what a request waits for
LINK_SECONDS = 1.5  # without a connection: then its requests are given up, to be placed on other nodes


class PeerConnections:
    """Owns the sockets; the receiver owns the protocol."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        incarnation: str,
        receiver: Receiver,
        poller: zmq.Poller,
        security: LinkSecurity | None = None,
    ) -> None:
        self._context = context
        self._name = name
        self._incarnation = incarnation
        self._receiver = receiver
        self._poller = poller
        self._security = security
        self._dealers: dict[str, Dealer] = {}  # prefill incarnation -> socket
        self._resets: dict[str, int] = {}  # of each socket, as far as they were acted on
        self._broken: set[str] = set()  # of the lost ones: those whose link is broken, and who may live
        self._lost: set[str] = set()  # of those: Hello has to be said (again) before pages are reserved

    def ensure(self, peer: NodeRef) -> None:
        """Connect and say Hello unless that has happened; say it again to one that was lost.

        Raises RequestError, at once where the link is known to be broken.
        """
        dealer = self._dealers.get(peer.incarnation)
        if dealer is None:
            dealer = self._open(peer)
        elif peer.incarnation not in self._lost:
            return
        if dealer.disconnected_for() > LINK_SECONDS:
            raise TransferFailed(f"prefill node {peer.name} cannot be reached from this decode node")
        self._receiver.connect(peer.incarnation, dealer.send)
        self._lost.discard(peer.incarnation)
        self._broken.discard(peer.incarnation)

    def pump(self) -> None:
        """Hand everything that has arrived to the receiver; notice links that are broken."""
        for incarnation, dealer in self._dealers.items():
            for frame in dealer.drain():
                self._receiver.handle(incarnation, frame)
            self._look_at_link(incarnation, dealer)

    def _look_at_link(self, incarnation: str, dealer: Dealer) -> None:
        if dealer.resets != self._resets[incarnation]:
            self._resets[incarnation] = dealer.resets
            self.lost(incarnation)  # another process listens there, or it has forgotten this node
        elif incarnation not in self._lost and dealer.disconnected_for() > LINK_SECONDS:
            self._receiver.link_lost(incarnation)
            self._lost.add(incarnation)
            self._broken.add(incarnation)  # the socket stays: it tells when the link works again

    def lost(self, incarnation: str) -> None:
        """The node is gone, or counts as gone. Its socket stays: if it lives it has aborts to acknowledge."""
        self._receiver.peer_lost(incarnation)
        self._broken.discard(incarnation)
        if incarnation in self._dealers:
            self._lost.add(incarnation)

    def all_lost(self) -> None:
        """This node counted as gone, so they have forgotten it: Hello is due again before the next reservation."""
        for incarnation in list(self._dealers):
            self.lost(incarnation)

    def close_unused(self, needed: Container[str]) -> None:
        """Close the sockets to lost nodes, but those that some request still names, in quarantine perhaps."""
        for incarnation in [each for each in self._lost - self._broken if each not in needed]:
            self._lost.discard(incarnation)
            dealer = self._dealers.pop(incarnation)
            del self._resets[incarnation]
            self._poller.unregister(dealer.socket)
            dealer.close()

    def _open(self, peer: NodeRef) -> Dealer:
        if len(self._dealers) >= MAX_PEERS:
            raise Overloaded(f"this decode node talks to {MAX_PEERS} prefill nodes already")
        # With the peer's incarnation: the socket to an earlier life of the peer reconnects to the new one's address.
        identity = routing_id(self._name, self._incarnation, peer.incarnation).encode()
        try:
            dealer = Dealer(
                self._context,
                peer.peer_address,
                identity,
                peer.name,
                self._security,
                silence=SILENCE_SECONDS,
            )
        except ConfigError as error:
            raise TransferFailed(f"prefill node {peer.name} cannot be connected to: {error}") from error
        self._dealers[peer.incarnation] = dealer
        self._resets[peer.incarnation] = 0
        self._lost.add(peer.incarnation)
        self._poller.register(dealer.socket, zmq.POLLIN)
        return dealer

    def close(self) -> None:
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
